"""Stand-in for SGLang's CUDA kernels where libcuda is missing: imports work, calls raise."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} needs CUDA, which this machine lacks")

    return missing
