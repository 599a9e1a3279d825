"""A step's requests written down, and run again."""
