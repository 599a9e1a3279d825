"""A rollout step or a serving trace, event by event, under any policy and with the step times of any source."""
