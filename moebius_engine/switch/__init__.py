"""When to switch (policy), and in which order (coordinator)."""
