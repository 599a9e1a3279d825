"""verl's whole training loop on a machine without a GPU: chosen by VERL_PLATFORM=cpu, never by accident."""
