"""GRPO on DeepMath-103K."""
