"""The service around the switching engine: a Ray actor, phase timing, metrics, the demo and the command line."""
