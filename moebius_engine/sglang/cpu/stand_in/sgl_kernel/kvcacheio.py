"""Names that sglang.srt.mem_cache.memory_pool_host imports unconditionally."""

from sgl_kernel import __getattr__ as __getattr__
