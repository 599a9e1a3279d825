"""A model of 0.2 million parameters that adds, not yet well: GRPO on a laptop has something to improve."""
