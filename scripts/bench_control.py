"""The control plane of a switch without a model: pack, exchange, place and rebuild N requests on two ranks.

Used by bench_engine.py. Real SGLang pools, prefix trees and batches, real gloo; no weights and no KV move.
"""

import gc
import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PROMPT, RESPONSE, SAMPLES = 128, 64, 8  # tokens, tokens, requests that share a prompt
END = {0}  # one set for all requests, as in SGLang


def control_ms(counts: list[int], repeats: int = 31) -> dict[str, dict[int, float]]:
    """Median milliseconds of a switch's control plane by number of live requests, the slower rank counted.

    Returns: "to_tp" and "to_ep" → requests → milliseconds.
    """
    from moebius_engine.sglang.ports import free_port

    results = mp.Manager().dict()
    mp.spawn(_rank, args=(2, free_port(), counts, repeats, results), nprocs=2)
    return {
        way: {count: max(results[rank, count, way] for rank in range(2)) for count in counts}
        for way in ("to_tp", "to_ep")
    }


def _rank(rank: int, ranks: int, port: int, counts: list[int], repeats: int, results) -> None:
    from moebius_engine.sglang.cpu import environment

    environment.prepare(ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs.__new__(ServerArgs)
    vars(args).update(enable_deterministic_inference=False, enable_custom_logit_processor=False)
    vars(args).update(speculative_algorithm=None, page_size=1, strip_thinking_cache=False)
    set_global_server_args_for_scheduler(args)
    for count in counts:
        ways: dict[str, list[float]] = {"to_tp": [], "to_ep": []}
        for _ in range(repeats):
            for way, elapsed in _round_trip(rank, ranks, count).items():
                ways[way].append(elapsed)
        for way, times in ways.items():
            results[rank, count, way] = 1e3 * statistics.median(times)
    dist.destroy_process_group()


def _round_trip(rank: int, ranks: int, count: int) -> dict[str, float]:
    """Seconds of one switch to TP and one back, for `count` requests of which this rank owns its share."""
    from moebius_engine.layout.partition import Capacity
    from moebius_engine.sglang import handover, kv_rows, placement, row_moves
    from moebius_engine.sglang.landing import Landing
    from moebius_engine.sglang.roster import Roster, _decoding_batch

    rows = count * (PROMPT + RESPONSE + 8)
    ep, tp = _state("ep", rows, count), _state("tp", rows, count)
    numbered = [(index, _request(index, ep)) for index in range(rank, count, ranks)]
    owned = [req for _, req in numbered]
    fresh = [placement.Held(req, rank, index // SAMPLES) for index, req in numbered]
    places = placement.plan_places(fresh, 1)
    _land(Landing(ep, places, kv_rows.occupy(ep, places, 1), []))
    roster, group = Roster(running=owned), dist.group.WORLD
    gc.collect()
    gc.disable()  # as Switcher.run does
    dist.barrier()

    began = time.perf_counter()
    given = handover.gather(roster, handover.share(roster, 0.5, group), rank, None)
    places = placement.plan_places(given.held[0], 1)
    occupied = kv_rows.occupy(tp, places, 1)
    row_moves.to_tp(ep, row_moves.by_ep_rank(places, ranks), occupied, rank)
    _land(Landing(tp, places, occupied, []))
    _decoding_batch(_scheduler(tp), given.roster.running)
    to_tp = time.perf_counter() - began

    ep.tree.reset(), ep.requests.clear(), ep.allocator.clear()
    dist.barrier()
    began = time.perf_counter()
    given = handover.divide(given.roster, 0.5, rank, ranks, Capacity(count, rows), 1)
    parts = [placement.plan_places(held, 1) for held in given.held]
    new_rows = [kv_rows.moved_elsewhere(ep, part, 1) for part in parts]
    occupied = kv_rows.occupy(ep, parts[rank], 1)
    row_moves.to_ep(tp, parts, new_rows)
    _land(Landing(ep, parts[rank], occupied, []))
    _decoding_batch(_scheduler(ep), given.roster.running)
    return {"to_tp": to_tp, "to_ep": time.perf_counter() - began}


def _land(landing) -> None:
    landing.plant()
    landing.settle_in()


def _state(layout: str, rows: int, requests: int):
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from moebius_engine.layout import Layout
    from moebius_engine.sglang.layout_state import LayoutState

    pool = ReqToTokenPool(requests + 8, PROMPT + RESPONSE + 8, "cpu", False)
    allocator = TokenToKVPoolAllocator(rows, torch.float32, "cpu", None, False)
    runner = SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool_allocator=allocator)
    state = LayoutState(Layout(layout), runner, None, None)
    tree = RadixCache(CacheInitParams(False, pool, allocator, 1))
    state.scheduler_attributes = {"tree_cache": tree}
    return state


def _request(index: int, state):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    prompt = [index // SAMPLES % 500, *range(PROMPT - 1)]
    params = SamplingParams(max_new_tokens=1024, temperature=1.0)
    params.normalize(None)
    req = Req(f"request-{index}", "", prompt, params, return_logprob=True, vocab_size=512, eos_token_ids=END)
    req.output_ids = [token * 7 % 512 for token in range(RESPONSE)]
    req.output_token_logprobs_val = [-0.5] * RESPONSE
    req.output_token_logprobs_idx = list(req.output_ids)
    req.send_output_token_logprobs_offset = RESPONSE - RESPONSE % 50  # SGLang delivers them every 50 tokens
    req.kv_committed_len = req.kv_allocated_len = PROMPT + RESPONSE - 1
    req.cache_protected_len = PROMPT
    return req


def _scheduler(state):
    return SimpleNamespace(
        req_to_token_pool=state.requests,
        token_to_kv_pool_allocator=state.allocator,
        tree_cache=state.tree,
        model_config=SimpleNamespace(vocab_size=512, is_encoder_decoder=False),
        enable_overlap=True,
        spec_algorithm=None,
        device="cpu",
    )
