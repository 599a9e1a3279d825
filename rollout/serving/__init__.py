"""A serving trace sent to an HTTP server, and what its clients saw."""
