"""Where weights and KV live: one arena a rank, seen by both layouts."""
