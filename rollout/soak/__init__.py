"""A rollout under faults, for as long as one likes: nothing may be lost."""
