"""Weight updates: what a full set is, and whether it has arrived."""
