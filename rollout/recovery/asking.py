"""Asks engines for what was promised, one after the other, until all tokens are there."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from moebius_engine.vitals import EngineDead
from rollout.recovery.gate import Gate
from rollout.recovery.keeper import Keeper
from rollout.recovery.promise import Part, Promise

_REFUSED = 400  # status code of a row that the door does not let in


async def keep(promise: Promise, keeper: Keeper, gate: Gate, weight_version: Callable[[], int]) -> dict[str, Any]:
    """Fills the promise's parts. Returns the finish reason, "abort" with a message for a row that the engine refuses.

    weight_version: of the weights as they are now; raises where they are not to be used. Raises EngineDead if no
    engine can be started any more. Cancelled, it aborts the request.
    """
    reason: dict[str, Any] | None = None
    while reason is None and not promise.complete:
        await keeper.ready(given_up=lambda: promise.aborted)
        async with gate.request(given_up=lambda: promise.aborted):
            if promise.aborted:
                return {"type": "abort", "message": "Aborted"}
            if engine := keeper.engine:  # it may have died while an update was waited for
                reason = await _ask(promise, engine, weight_version())
    return reason or {"type": "length", "length": len(promise.tokens)}


async def _ask(promise: Promise, engine: Any, version: int) -> dict[str, Any] | None:
    """Asks one engine for the rest. Returns the finish reason, or None if there is more to ask for."""
    prompt, sampling = promise.ask()
    try:
        answer = await engine.async_generate(
            input_ids=prompt, sampling_params=sampling, rid=promise.request_id, return_logprob=True
        )
    except EngineDead:
        tokens, logprobs = engine.so_far(promise.request_id)
        promise.engine_died(Part(tokens, logprobs, version))
        return None
    except ValueError as error:  # a bad row, refused at the door
        refusal = {"type": "abort", "message": str(error), "status_code": _REFUSED}
        answer = {"output_ids": [], "meta_info": {"finish_reason": refusal}}
    except asyncio.CancelledError:  # nobody waits for it any more: do not let it run on
        with contextlib.suppress(EngineDead):
            await engine.async_abort(rid=promise.request_id)
        raise
    meta = answer["meta_info"]
    if promise.parts and meta["finish_reason"].get("status_code") == _REFUSED:
        promise.drop_tokens()  # prompt and tokens are too long for a prompt
        return None
    logprobs = [logprob for logprob, *_ in meta.get("output_token_logprobs") or ()]
    promise.parts.append(Part(list(answer["output_ids"]), logprobs, version))
    return meta["finish_reason"]
