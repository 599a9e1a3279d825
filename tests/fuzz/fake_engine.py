"""An engine in one process: real requests, pools and prefix trees on every rank, and a model that only reads KV rows.

Fake are the forward pass, the choice of what runs next, and transport. Real are SGLang's host-side objects and what a
switch does with them: the door, requests.py, handover.py, placement.py, kv_rows.py, row_moves.py and landing.py. The
next token is a sum over the KV rows that a request's table names, so a row in the wrong place gives another token.
"""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from sglang.srt import server_args
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.sglang import door, handover, kv_rows, placement, row_moves
from moebius_engine.sglang.landing import Landing
from moebius_engine.sglang.requests import forget_place
from tests.fuzz.fake_rank import CONTEXT, VOCAB, Rank

TURNS = 6  # of the event loop for a step: an event of a script takes some, and should not outlast requests


class FakeEngine:
    """play.Engine without a process. page: rows of a page."""

    def __init__(self, page: int = 1, ranks: int = 2):
        # SGLang's memory functions ask for these.
        settings = SimpleNamespace(page_size=page, speculative_algorithm=None, strip_thinking_cache=False)
        server_args.set_global_server_args_for_scheduler(settings)  # type: ignore[arg-type]
        self.ranks, self.page = [Rank(page) for _ in range(ranks)], page
        self.config, self.shape, self.context_len = SwitchConfig(), SimpleNamespace(vocab_size=VOCAB), CONTEXT
        self.server_args = SimpleNamespace(
            skip_tokenizer_init=False, grammar_backend="none", enable_return_hidden_states=False
        )
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_req_input_len": CONTEXT - 1}])
        self._answers: dict[str, asyncio.Queue] = {}
        self.tokenizer_manager = SimpleNamespace(rid_to_state=self._answers, tokenizer=None)
        self._steps, self._arrived, self._broken = 0, 0, False
        self._weights, self._released = True, set[str]()
        self._going = asyncio.Event()
        self._going.set()
        self._loop = asyncio.ensure_future(self._run())

    @property
    def layout(self) -> Layout:
        return self.ranks[0].layout

    def _inflight(self) -> int:
        counts = [len(rank.all) for rank in self.ranks]
        return sum(counts) if self.layout == Layout.EP else counts[0]

    @property
    def _closed(self) -> str:
        if self._released:
            return f"the memory of {self._released} has been released"
        return "" if self._weights else "weights are incomplete"

    # ---- running

    async def _run(self) -> None:
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if self._going.is_set() and self._inflight():
                self._steps += 1
                for number, rank in enumerate(self.ranks):
                    self._report(number, rank.step())
                if self.layout == Layout.TP:
                    assert len({str([(req.rid, req.output_ids) for req in rank.all]) for rank in self.ranks}) == 1

    def _report(self, rank: int, reqs: list[Req]) -> None:
        """In TP rank 0 speaks for all."""
        if self.layout == Layout.EP or rank == 0:
            for req in reqs:
                queue = self._answers[req.rid]
                queue.put_nowait(_answer(req))
                if req.finished():
                    del self._answers[req.rid]

    async def stop(self) -> None:
        """Raises what the ranks raised."""
        self._loop.cancel()
        with suppress(asyncio.CancelledError):
            await self._loop

    # ---- play.Engine

    async def async_generate(self, **request: Any) -> Any:
        return await door.async_generate(self, self._upstream, (), request)

    async def _upstream(self, **accepted: Any) -> Any:
        stream = self._stream(accepted)
        if accepted["stream"]:
            return stream
        async for answer in stream:
            last = answer
        return last

    async def _stream(self, accepted: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        rid = accepted["rid"]
        queue = self._answers[rid] = asyncio.Queue()
        await self._going.wait()
        params = SamplingParams(**accepted["sampling_params"])
        params.normalize(None)
        number = self._arrived % len(self.ranks)
        self._arrived += 1
        for index, rank in enumerate(self.ranks):
            if self.layout == Layout.TP or index == number:
                req = Req(rid, "", list(accepted["input_ids"]), params, eos_token_ids=set(), vocab_size=VOCAB)
                rank.waiting.append(req)
                if self._closed:
                    self._report(index, rank.end(lambda one, req=req: one is req, FINISH_ABORT(self._closed)))
        while True:
            answer = await self._next_answer(queue)
            yield answer
            if answer["meta_info"]["finish_reason"] is not None:
                return

    async def _next_answer(self, queue: asyncio.Queue) -> dict[str, Any]:
        """Raises what the ranks raised, instead of waiting for ever."""
        getting = asyncio.ensure_future(queue.get())
        await asyncio.wait([getting, self._loop], return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            self._loop.result()
        return getting.result()

    async def async_abort(self, rid: str = "", abort_all: bool = False) -> None:
        for number, rank in enumerate(self.ranks):
            hit = [req for req in rank.all if abort_all or req.rid == rid]
            now = [req for req in hit if req in rank.waiting or not self._going.is_set()]
            for req in hit:
                req.to_finish = FINISH_ABORT()
            self._report(number, rank.end(lambda req, now=now: req in now, FINISH_ABORT()))

    async def async_health(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        ranks = [{"forward_ct": self._steps, "inflight": len(rank.all)} for rank in self.ranks]
        return {"inflight": self._inflight(), "ok": not self._closed, "layout": self.layout, "ranks": ranks}

    async def pause(self, mode: str) -> None:
        self._going.clear()
        if mode == "retract":
            for rank in self.ranks:
                rank.retract_all()

    async def go_on(self) -> None:
        self._going.set()

    async def flush(self) -> bool:
        if self._inflight():
            return False
        for rank in self.ranks:
            rank.state.clear()
        return True

    async def update(self, flush: bool) -> str:
        while self._going.is_set() and self._inflight():
            await asyncio.sleep(0)
        if "weights" in self._released:
            raise ValueError("the memory of weights has been released")
        if flush and not await self.flush():
            raise ValueError("requests are in flight")
        if not self._inflight() and self._weights:
            self._select(Layout.EP)
        self._weights = True
        return self.layout

    async def async_release_memory_occupation(self, tags: list[str]) -> None:
        if self._released & set(tags):
            raise RuntimeError(f"the memory of {self._released} has been released already")
        if not await self.flush():
            raise RuntimeError(f"{self._inflight()} requests are in flight")
        if "weights" in tags:
            if self._weights:
                self._select(Layout.EP)
            self._weights = False
        self._released |= set(tags)

    async def async_resume_memory_occupation(self, tags: list[str]) -> None:
        self._released -= set(tags)

    async def break_next_switch(self) -> None:
        self._broken = True

    def live_ids(self) -> list[str]:
        return list(self._answers)

    # ---- a switch

    async def async_switch(self, layout: str) -> SimpleNamespace | None:
        target, inflight, refused = Layout(layout), self._inflight(), self._closed or None
        if target == self.layout:
            return None
        if not refused:
            given, places, taken = self._plan(target)
            self._move(target, places, taken)
            if self._broken:
                refused, self._broken = "rolled back: broken on purpose", False
                for rank in self.ranks:
                    rank.states[target].clear()
            else:
                self._commit(target, given, places, taken)
        return SimpleNamespace(inflight=inflight, refused=refused)

    def _plan(self, target: Layout) -> tuple[list, list, list]:
        """What the ranks would compute, each by itself: what is given to each, its places, the rows taken for them."""
        if target == Layout.TP:
            said = pickle.loads(pickle.dumps([handover.say(rank.roster(), 0.5) for rank in self.ranks]))
            given = [handover.gather(rank.roster(), said, number, None) for number, rank in enumerate(self.ranks)]
        else:
            limits = self.ranks[0].states[target].capacity
            given = [
                handover.divide(rank.roster(), 0.5, number, len(self.ranks), limits, self.page)
                for number, rank in enumerate(self.ranks)
            ]
        places = [[placement.plan_places(held, self.page) for held in one.held] for one in given]
        taken = []
        for number, rank in enumerate(self.ranks):
            own, state = places[number][0 if target == Layout.TP else number], rank.states[target]
            left = handover.rows_to_fill(given[number].roster.prefilling, self.page)
            assert placement.rows_needed(own, self.page) + left <= state.allocator.size
            taken.append((own, kv_rows.occupy(state, own, self.page)))
        return given, places, taken

    def _move(self, target: Layout, places: list, taken: list) -> None:
        moves = []
        for number, rank in enumerate(self.ranks):
            if target == Layout.TP:
                by_rank = row_moves.by_ep_rank(places[number][0], len(self.ranks))
                moves.append(row_moves.to_tp(rank.states[Layout.EP], by_rank, taken[number][1], number))
            else:
                own = taken[number]
                rows = [own[1].moved(own[0]) if other == number else None for other in range(len(self.ranks))]
                moves.append(row_moves.to_ep(rank.states[Layout.TP], places[number], rows))
        for owner, rank in enumerate(self.ranks):
            for number, other in enumerate(self.ranks):
                ep_rows, tp_rows = moves[owner][owner].ep_rows, moves[number][owner].tp_rows
                if target == Layout.TP:
                    other.kv[Layout.TP][tp_rows] = rank.kv[Layout.EP][ep_rows]
                elif number == 0:
                    rank.kv[Layout.EP][ep_rows] = other.kv[Layout.TP][tp_rows]

    def _commit(self, target: Layout, given: list, places: list, taken: list) -> None:
        for rank, mine, (own, occupied) in zip(self.ranks, given, taken, strict=True):
            landing = Landing(rank.states[target], own, occupied, mine.roster.prefilling)
            landing.plant()
            for req in mine.retracted:
                req.reset_for_retract()
            for req in mine.roster.waiting:
                forget_place(req)
            landing.settle_in()
            rank.state.clear()
            rank.layout = target
            rank.running, rank.prefilling, rank.waiting = (
                mine.roster.running,
                mine.roster.prefilling,
                mine.roster.waiting,
            )

    def _select(self, target: Layout) -> None:
        for rank in self.ranks:
            rank.state.clear()
            rank.layout = target


def _answer(req: Req) -> dict[str, Any]:
    reason = req.finished_reason.to_json() if req.finished() else None
    return {"text": "", "output_ids": list(req.output_ids), "meta_info": {"id": req.rid, "finish_reason": reason}}
