"""One rank of the fake engine: real requests, pools and prefix trees, and a model that only reads KV rows.

The next token is a sum over the KV rows that a request's table names, so a row in the wrong place gives another token.
"""

from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from moebius_engine.layout import Layout
from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.roster import Roster

VOCAB, CONTEXT, CHUNK = 97, 128, 8
ROWS, SLOTS = 128, 6  # of a rank, in EP


def next_token(kv_T: torch.Tensor) -> int:
    """From the KV of all tokens so far, in order."""
    return int((kv_T * torch.arange(1, len(kv_T) + 1)).sum()) % VOCAB


def kv_of(tokens: list[int], first: int) -> torch.Tensor:
    """What is written for tokens at positions `first` onwards."""
    tokens_T = torch.tensor(tokens, dtype=torch.int64)
    return tokens_T * 31 + (torch.arange(len(tokens)) + first) * 7 + 1


def response(prompt: list[int], count: int) -> list[int]:
    """What the model answers, without pools or ranks."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(kv_of(tokens, 0)))
    return tokens[len(prompt) :]


class Rank:
    """One rank's requests and memory. kv: by layout, one number a row."""

    def __init__(self, page: int):
        self.page, self.layout = page, Layout.EP
        self.states = {Layout.EP: _state(Layout.EP, page, 1), Layout.TP: _state(Layout.TP, page, 2)}
        self.kv = {layout: torch.zeros(state.allocator.size + page) for layout, state in self.states.items()}
        self.kv = {layout: rows.to(torch.int64) for layout, rows in self.kv.items()}
        self.running: list[Req] = []
        self.prefilling: list[Req] = []
        self.waiting: list[Req] = []

    @property
    def state(self) -> LayoutState:
        return self.states[self.layout]

    @property
    def all(self) -> list[Req]:
        return self.running + self.prefilling + self.waiting

    def roster(self) -> Roster:
        return Roster(list(self.running), list(self.prefilling), list(self.waiting))

    # ---- a step

    def step(self) -> list[Req]:
        """Prefill a chunk if there is one, else decode. Returns: the requests with a new token or an end."""
        if not self.prefilling and self.waiting and self._has_room(self.waiting[0]):
            self.prefilling.append(self._begin(self.waiting.pop(0)))
        if self.prefilling:
            return self._prefill(self.prefilling[0])
        return self._decode()

    def _has_room(self, req: Req) -> bool:
        free = self.state.allocator.available_size() + self.state.tree.evictable_size()
        needed = len(req.origin_input_ids) + len(req.output_ids) + 2 * self.page
        # As SGLang: a share of what the others will still grow by, so that some are retracted at times.
        growing = sum(one.sampling_params.max_new_tokens - len(one.output_ids) for one in self.running) // 4
        return bool(self.state.requests.free_slots) and needed + growing <= free

    def _begin(self, req: Req) -> Req:
        state, tokens = self.state, req.origin_input_ids + req.output_ids
        found = state.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], req.extra_key)))
        req.prefix_indices, req.last_node = found.device_indices, found.last_device_node
        state.tree.inc_lock_ref(req.last_node)
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = len(req.prefix_indices)
        req.kv_committed_freed = req.kv_overallocated_freed = False
        req.req_pool_idx = state.requests.free_slots.pop(0)
        state.requests.req_to_token[req.req_pool_idx, : req.kv_committed_len] = req.prefix_indices.to(torch.int32)
        return req

    def _prefill(self, req: Req) -> list[Req]:
        tokens, first = req.origin_input_ids + req.output_ids, req.kv_committed_len
        last = min(len(tokens), first + CHUNK)
        self._write(req, tokens[first:last])
        req.fill_ids = tokens[:last]
        self.state.tree.cache_unfinished_req(req, chunked=last < len(tokens))
        if last < len(tokens):
            return []
        self.prefilling.remove(req)
        self.running.append(req)
        return self._next([req])

    def _decode(self) -> list[Req]:
        done = 0
        while done < len(self.running):
            req = self.running[done]
            while not self._can_take(1):
                victim = self.running.pop()
                self._let_go(victim)
                victim.reset_for_retract()
                self.waiting.insert(0, victim)
                if victim is req:
                    break
            else:
                self._write(req, [req.output_ids[-1]])
                done += 1
        return self._next(list(self.running))

    def _next(self, reqs: list[Req]) -> list[Req]:
        for req in reqs:
            rows_T = self.state.requests.req_to_token[req.req_pool_idx, : req.kv_committed_len].to(torch.int64)
            req.output_ids.append(next_token(self.kv[self.layout][rows_T]))
            if req.to_finish is not None:
                req.finished_reason = req.to_finish
            elif len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = FINISH_LENGTH(len(req.output_ids))
            if req.finished():
                self.running.remove(req)
                release_kv_cache(req, self.state.tree)
        return reqs

    # ---- memory

    def _can_take(self, rows: int) -> bool:
        rows += self.page
        missing = rows - self.state.allocator.available_size()
        if missing > 0:
            self.state.tree.evict(EvictParams(num_tokens=missing))
        return self.state.allocator.available_size() >= rows

    def _write(self, req: Req, tokens: list[int]) -> None:
        """Give the request rows for its next tokens, and write their KV."""
        table, first = self.state.requests.req_to_token[req.req_pool_idx], req.kv_committed_len
        last = first + len(tokens)
        assert self._can_take(len(tokens)), "a request was begun without room for its prompt"
        pages = -(-last // self.page) - -(-first // self.page)
        new_T = self.state.allocator.alloc(pages * self.page)
        if first % self.page:  # the rest of the last page
            new_T = torch.cat([int(table[first - 1]) + 1 + torch.arange(self.page - first % self.page), new_T])
        rows_T = new_T[: len(tokens)]
        table[first:last] = rows_T.to(torch.int32)
        self.kv[self.layout][rows_T] = kv_of(tokens, first)
        req.kv_committed_len = req.kv_allocated_len = last

    def _let_go(self, req: Req) -> None:
        release_kv_cache(req, self.state.tree, is_insert=False)

    def end(self, hit, reason) -> list[Req]:
        """End requests now, whatever they are doing. Returns them."""
        ended = [req for req in self.all if hit(req)]
        for req in ended:
            if req not in self.waiting:
                self._let_go(req)
            req.finished_reason = reason
        self.running, self.prefilling, self.waiting = (
            [req for req in reqs if req not in ended] for reqs in (self.running, self.prefilling, self.waiting)
        )
        return ended

    def retract_all(self) -> None:
        held = self.running + self.prefilling
        for req in held:
            self._let_go(req)
            req.reset_for_retract()
        self.running, self.prefilling, self.waiting = [], [], held + self.waiting


def _state(layout: Layout, page: int, times: int) -> LayoutState:
    """Empty pools of a layout. times: how much of them, measured in EP's."""
    requests = ReqToTokenPool(SLOTS * times, CONTEXT, "cpu", False)
    if page == 1:
        allocator = TokenToKVPoolAllocator(ROWS * times, torch.float32, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(ROWS * times, page, torch.float32, "cpu", None, False)
    runner = SimpleNamespace(req_to_token_pool=requests, token_to_kv_pool_allocator=allocator)
    state = LayoutState(layout, runner, None, None)  # type: ignore[arg-type]
    tree = RadixCache(CacheInitParams(False, requests, allocator, page))
    state.scheduler_attributes = {"tree_cache": tree}
    return state
