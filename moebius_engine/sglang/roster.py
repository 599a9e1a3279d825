"""The requests of a settled scheduler, and rebuilding a scheduler from them."""

from dataclasses import dataclass, field

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from moebius_engine.sglang import penalties
from moebius_engine.sglang.penalties import PenaltyState


@dataclass
class Roster:
    """Requests of one rank by state; `penalties` by request id."""

    running: list[Req] = field(default_factory=list)
    prefilling: list[Req] = field(default_factory=list)  # half-prefilled: KV up to kv_committed_len
    waiting: list[Req] = field(default_factory=list)  # no KV: new, or retracted with tokens, or without its grammar yet
    penalties: dict[str, PenaltyState] = field(default_factory=dict)

    @property
    def held(self) -> list[Req]:
        """Requests with KV."""
        return self.running + self.prefilling

    @property
    def all(self) -> list[Req]:
        return self.held + self.waiting


def read_roster(scheduler) -> Roster:
    """The requests of a settled scheduler."""
    prefilling = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return Roster(
        running=list(scheduler.running_batch.reqs),
        prefilling=prefilling + list(scheduler.parked),
        waiting=scheduler.waiting_queue + scheduler.grammar_manager.grammar_queue,
        penalties=penalties.capture(scheduler.running_batch),
    )


def write_roster(scheduler, roster: Roster) -> None:
    """Give a scheduler, whose layout is selected and whose pools hold the requests' KV, its requests.

    SGLang prefills one half-prefilled request at a time: the others are parked until it is done.
    """
    scheduler.running_batch = _decoding_batch(scheduler, roster.running)
    penalties.restore(scheduler.running_batch, roster.penalties)
    scheduler.chunked_req = roster.prefilling[0] if roster.prefilling else None
    scheduler._chunked_req_scheduled_last_iter = False
    scheduler.parked.clear()
    scheduler.parked.extend(roster.prefilling[1:])
    scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue = list(roster.waiting), []
    scheduler.last_batch = scheduler.cur_batch = None


def retract(scheduler, reqs: list[Req]) -> None:
    """Give up the KV of requests of a settled scheduler: they wait again, with the tokens that they have."""
    _let_go(scheduler, reqs)
    for req in reqs:
        req.reset_for_retract()
    scheduler.waiting_queue = reqs + scheduler.waiting_queue


def end_aborted(scheduler) -> None:
    """End the aborted requests of a settled scheduler without the forward step in which they would have ended."""
    aborted = [req for req in read_roster(scheduler).held if req.to_finish is not None]
    _let_go(scheduler, aborted)
    for req in aborted:
        req.check_finished()
    report(scheduler, aborted)


def report(scheduler, finished: list[Req]) -> None:
    """Report requests that have finished outside a batch, with the tokens that they have."""
    if finished:
        scheduler.stream_output(finished, any(req.return_logprob for req in finished))


def _let_go(scheduler, reqs: list[Req]) -> None:
    """Take requests with KV out of a settled scheduler and free it."""
    gone = {id(req) for req in reqs}
    if not gone:
        return
    batch = scheduler.running_batch
    if not batch.is_empty():
        batch.filter_batch(keep_indices=[row for row, req in enumerate(batch.reqs) if id(req) not in gone])
        batch.batch_is_full = False
    prefilling = [req for req in (scheduler.chunked_req, *scheduler.parked) if req is not None and id(req) not in gone]
    scheduler.chunked_req = prefilling[0] if prefilling else None
    scheduler.parked.clear()
    scheduler.parked.extend(prefilling[1:])
    for req in reqs:
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)


def _decoding_batch(scheduler, reqs: list[Req]) -> ScheduleBatch:
    """A fresh decoding batch: an old one would carry the other layout's global token counts into the forward pass."""
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    if not reqs:
        batch.batch_is_full = False
        return batch
    lengths = [req.kv_committed_len for req in reqs]
    device = scheduler.device
    batch.req_pool_indices = torch.tensor([req.req_pool_idx for req in reqs], dtype=torch.int64, device=device)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device, copy=True)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = sum(lengths)
    batch.output_ids = torch.tensor([req.output_ids[-1] for req in reqs], dtype=torch.int64, device=device)
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.token_ids_logprob for req in reqs]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    return batch
