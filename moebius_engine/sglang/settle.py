"""Bringing SGLang's scheduler between two steps."""

from sglang.srt.managers.schedule_batch import Req

from moebius_engine.sglang import penalties


def settle(scheduler) -> None:
    """Process every launched step and merge prefilled requests, as SGLang does before it forms the next batch.

    Afterwards `running_batch` holds every decoding request, `chunked_req` a half-prefilled one with its KV recorded in
    `prefix_indices`, and no batch is in flight. Close to Scheduler.pause_generation (scheduler.py:3660), which however
    merges the half-prefilled request into the decoding ones. Safe to go on from in the same layout.
    """
    chunked: Req | None = scheduler.chunked_req
    if scheduler.enable_overlap:
        while scheduler.result_queue:
            batch, result = scheduler.result_queue.popleft()
            scheduler.process_batch_result(batch, result)
            penalties.mark_lagging(batch, chunked)
    if chunked is not None and scheduler._chunked_req_scheduled_last_iter:
        scheduler.stash_chunked_request(chunked)
        scheduler._chunked_req_scheduled_last_iter = False
    last = scheduler.last_batch
    if last is not None and last.forward_mode.is_extend():
        last.filter_batch(chunked_req_to_exclude=[req for req in (chunked, last.chunked_req) if req is not None])
        if not last.is_empty():
            if scheduler.running_batch.is_empty():
                scheduler.running_batch = last
            else:
                scheduler.running_batch.merge_batch(last)
    scheduler.last_batch = scheduler.cur_batch = None
    if not scheduler.running_batch.is_empty():
        scheduler.running_batch.filter_batch()
        scheduler.running_batch.batch_is_full = False  # of the requests that have ended; else none would follow them
