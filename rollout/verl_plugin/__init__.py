"""verl 0.9.1: `actor_rollout_ref.rollout.name=moebius`. Everything that touches verl's internals stands here."""
