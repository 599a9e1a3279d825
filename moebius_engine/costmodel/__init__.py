"""What decode steps and switches cost, by arithmetic: no device is used and SGLang is not imported."""
