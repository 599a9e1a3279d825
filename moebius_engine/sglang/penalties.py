"""Sampling penalties across a switch: their state is carried, not replayed.

With overlap scheduling SGLang feeds a decode step's penalties the token before the last one, because the last one is
still being computed when the step is prepared (schedule_batch.py:2310). A switch settles that step first, so the next
step would be fed one token too far and skip one. `lagging` marks the requests concerned, and the hook feeds them the
token that the unswitched run would have seen.
"""

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer

from moebius_engine.sglang.hooks import Hook

# penalizer → (its per-request state, value where nothing has been penalised)
_STATE = {
    BatchedFrequencyPenalizer: ("cumulated_frequency_penalties", 0.0),
    BatchedPresencePenalizer: ("cumulated_presence_penalties", 0.0),
    BatchedRepetitionPenalizer: ("cumulated_repetition_penalties", 1.0),
    BatchedMinNewTokensPenalizer: ("len_output_tokens", 0),
}

PenaltyState = dict[str, tuple[list[int], list[float]]]
"""Penalizer's name → (columns, values) of one request's row, only where it differs from neutral."""


def capture(batch: ScheduleBatch) -> dict[str, PenaltyState]:
    """State of every request of a settled batch that has penalties, by request id."""
    states: dict[str, PenaltyState] = {}
    if batch.is_empty() or not batch.sampling_info.penalizer_orchestrator.is_required:
        return states
    for kind, (attribute, neutral) in _STATE.items():
        penalizer = batch.sampling_info.penalizer_orchestrator.penalizers[kind]
        if not penalizer.is_prepared():
            continue
        for req, row in zip(batch.reqs, getattr(penalizer, attribute).cpu(), strict=True):
            (columns,) = torch.nonzero(row != neutral, as_tuple=True)
            states.setdefault(req.rid, {})[kind.__name__] = (columns.tolist(), row[columns].tolist())
    return states


def restore(batch: ScheduleBatch, states: dict[str, PenaltyState]) -> None:
    """Write captured states into a batch that was built anew."""
    if batch.is_empty() or not batch.sampling_info.penalizer_orchestrator.is_required:
        return
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for kind, (attribute, _) in _STATE.items():
        penalizer = orchestrator.penalizers[kind]
        if not penalizer.is_prepared():
            continue
        state_BV = getattr(penalizer, attribute)
        for row, req in enumerate(batch.reqs):
            columns, values = states.get(req.rid, {}).get(kind.__name__, ([], []))
            if columns:
                state_BV[row, columns] = torch.tensor(values, dtype=state_BV.dtype, device=state_BV.device)


def mark_lagging(batch: ScheduleBatch, chunked: Req | None) -> None:
    """Mark the requests of a launched step that a switch has just settled early; `chunked` has no token yet."""
    for req in batch.reqs:
        params = req.sampling_params
        penalised = (
            params.frequency_penalty
            or params.presence_penalty
            or params.min_new_tokens
            or params.repetition_penalty != 1
        )
        if penalised and not req.finished() and req is not chunked:
            req.penalty_token = req.output_ids[-2] if len(req.output_ids) > 1 else req.origin_input_ids[-1]


def cumulate_output_tokens(original, self, output_ids):
    lagging = [(row, req) for row, req in enumerate(self.reqs()) if getattr(req, "penalty_token", None) is not None]
    if lagging:
        output_ids = output_ids.clone()
        for row, req in lagging:
            output_ids[row] = req.penalty_token
            req.penalty_token = None
    return original(self, output_ids)


PENALTY_HOOKS = (
    Hook(
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.cumulate_output_tokens",
        HookType.AROUND,
        cumulate_output_tokens,
        ("self", "output_ids"),
        "after a switch the first decode step must be fed the token that the overlapped run would have seen",
    ),
)
