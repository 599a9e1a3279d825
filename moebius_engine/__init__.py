"""The switching engine: SGLang with an expert-parallel and a tensor-parallel layout of one model."""
