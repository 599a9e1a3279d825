"""KV rows by whole pages on a CPU: SGLang allocates them with Triton kernels."""

import torch
from sglang.srt.mem_cache.allocator import alloc_extend_naive


def alloc_extend(
    original,
    self,
    prefix_lens,
    prefix_lens_cpu,
    seq_lens,
    seq_lens_cpu,
    last_loc,
    extend_num_tokens,
    num_new_pages=None,
):
    if not seq_lens.is_cpu:
        return original(
            self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )
    pages = int((_pages(seq_lens_cpu, self.page_size) - _pages(prefix_lens_cpu, self.page_size)).sum())
    if pages > len(self.free_pages):
        return None
    rows = torch.empty(extend_num_tokens, dtype=torch.int64)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, rows, self.page_size, self.device)
    self.free_pages = self.free_pages[pages:]
    return rows


def alloc_decode(original, self, seq_lens, seq_lens_cpu, last_loc):
    if not seq_lens.is_cpu:
        return original(self, seq_lens, seq_lens_cpu, last_loc)
    begins_page = (seq_lens - 1) % self.page_size == 0
    pages = int(begins_page.sum())
    if pages > len(self.free_pages):
        return None
    rows = last_loc.to(torch.int64) + 1
    rows[begins_page] = self.free_pages[:pages] * self.page_size
    self.free_pages = self.free_pages[pages:]
    return rows


def _pages(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (tokens + page_size - 1) // page_size
