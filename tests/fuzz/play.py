"""Plays a script on an engine and checks what must come back: the contract of SwitchingEngine, for a real one and for
the fake one alike."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.fuzz import script
from tests.fuzz.script import Event

DEADLINE_S = 60.0


class Engine(Protocol):
    """What a script needs of an engine: SwitchingEngine's own methods, and shorter names for SGLang's."""

    async def async_generate(self, **request: Any) -> Any: ...
    async def async_switch(self, layout: str) -> Any: ...
    async def async_abort(self, rid: str = "", abort_all: bool = False) -> None: ...
    async def async_health(self) -> dict[str, Any]: ...
    async def async_release_memory_occupation(self, tags: Any) -> None: ...
    async def async_resume_memory_occupation(self, tags: Any) -> None: ...
    async def pause(self, mode: str) -> None: ...
    async def go_on(self) -> None: ...
    async def flush(self) -> bool: ...
    async def update(self, flush: bool) -> str:
        """Returns the layout that it left the engine in."""

    async def break_next_switch(self) -> None: ...
    def live_ids(self) -> list[str]: ...


@dataclass
class Sent:
    """A request on its way. closed: words of the refusal that it must get. duplicate: whether its id may be in use."""

    rid: str
    prompt: int
    tokens: int
    task: asyncio.Task
    closed: str = ""
    held: bool = False  # by SGLang's tokenizer, until the engine goes on
    aborted: bool = False
    raced: bool = False  # with a release, which it may have reached the ranks after
    duplicate: bool = False


@dataclass
class Play:
    """The state that the contract says the engine is in.

    prompts: token ids by index. reference: the longest response to each, undisturbed.
    """

    engine: Engine
    prompts: Sequence[list[int]]
    reference: Mapping[int, list[int]]
    layout: str = "ep"
    released: set[str] = field(default_factory=set)
    weights: bool = True
    paused: bool = False
    sent: list[Sent] = field(default_factory=list)
    switches: int = 0  # with requests in flight

    async def run(self, events: Sequence[Event]) -> None:
        """Raises AssertionError where the engine breaks the contract, TimeoutError where it hangs."""
        try:
            for event in events:
                await asyncio.wait_for(_EVENTS[type(event)](self, *event), DEADLINE_S)
            await self._end()
        finally:
            for sent in self.sent:
                sent.task.cancel()

    # ---- events

    async def submit(self, prompt: int, tokens: int, stream: bool) -> None:
        await self._send(f"request {len(self.sent)}", prompt, tokens, stream)

    async def again(self, which: int) -> None:
        if self.sent:
            first = self.sent[which % len(self.sent)]
            others = [sent for sent in self._unanswered() if sent.rid == first.rid]
            certain = any(sent.held for sent in others)
            second = await self._send(first.rid, first.prompt, first.tokens, False)
            second.duplicate = bool(others)
            if certain:
                assert "already in use" in _message(await self._answer(second))

    async def bad(self) -> None:
        answer = await self.engine.async_generate(input_ids=[], sampling_params={"max_new_tokens": 1})
        assert (answer["output_ids"], "empty" in _message(answer)) == ([], True)

    async def abort(self, which: int) -> None:
        if self.sent:
            victim = self.sent[which % len(self.sent)]
            await self._aborted([sent for sent in self._unanswered() if sent.rid == victim.rid])

    async def abort_all(self) -> None:
        await self._aborted(self._unanswered())

    async def switch(self, layout: str, broken: bool) -> None:
        before = self._unanswered(held=False)
        if layout == "other":
            layout = "tp" if self.layout == "ep" else "ep"
        if broken and layout != self.layout and not self._closed:
            await self.engine.break_next_switch()
        record = await self.engine.async_switch(layout)
        if layout == self.layout:
            assert record is None
            return
        if self._closed:
            assert self._closed in record.refused
        elif broken:
            assert record.refused and "rolled back" in record.refused
        else:
            assert record.refused is None, record.refused
            self.layout = layout
        if not self._closed:
            assert record.inflight <= len(before)
            self.switches += record.inflight > 0
        await self._check_layout()

    async def pause(self, mode: str) -> None:
        await self.engine.pause(mode)
        self.paused = True
        steps = await self._forward_steps()
        # Requests on their way arrive, and so do answers; nothing else changes any more.
        while (await self.engine.async_health())["inflight"] != len(self._unanswered(held=False)):
            await asyncio.sleep(0)
        assert await self._forward_steps() == steps, "a paused engine took a step"

    async def go_on(self) -> None:
        await self.engine.go_on()
        self.paused = False
        held = [sent for sent in self.sent if sent.held]
        for sent in held:
            sent.held, sent.closed = False, self._closed
        await asyncio.sleep(0)
        if self._closed:
            await self._all_answered(held)

    async def flush(self) -> None:
        await self._flushed(await self.engine.flush())

    async def update(self, flush: bool) -> None:
        before = self._unanswered(held=False)
        try:
            layout = await self.engine.update(flush)
        except ValueError as error:
            if "weights" in self.released:
                assert "released" in str(error)
            else:
                assert flush and self.paused and before and "in flight" in str(error), error
            return
        assert "weights" not in self.released
        if flush or layout != self.layout:
            await self._all_answered(before)
        assert layout in (self.layout, "ep")
        self.layout, self.weights = layout, True
        await self._check_layout()

    async def release(self, tags: tuple[str, ...]) -> None:
        before = self._unanswered(held=False)
        try:
            await self.engine.async_release_memory_occupation(list(tags))
        except RuntimeError as error:
            twice = self.released & set(tags) and "already" in str(error)
            assert twice or (before and "in flight" in str(error)), error
            return
        assert not self.released & set(tags)
        for sent in before:
            sent.raced = True
        await self._all_answered(before)
        self.released |= set(tags)
        if "weights" in tags:
            # Already incomplete, they stay in the layout in which they are.
            self.layout, self.weights = "ep" if self.weights else self.layout, False
        await self._check_layout()

    async def resume(self, tags: tuple[str, ...]) -> None:
        await self.engine.async_resume_memory_occupation(list(tags))
        self.released -= set(tags)

    async def steps(self, count: int) -> None:
        if not self.paused:
            target = await self._forward_steps() + count
            while self._unanswered() and await self._forward_steps() < target:
                await asyncio.sleep(0)

    # ---- what must hold

    @property
    def _closed(self) -> str:
        """A word of why nothing can be generated; empty if it can."""
        return "released" if self.released else "" if self.weights else "incomplete"

    async def _send(self, rid: str, prompt: int, tokens: int, stream: bool) -> Sent:
        request = {
            "input_ids": self.prompts[prompt],
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
            "rid": rid,
            "stream": stream,
        }
        task = asyncio.ensure_future(_last_chunk(self.engine, request))
        sent = Sent(rid, prompt, tokens, task, closed=self._closed, held=self.paused)
        self.sent.append(sent)
        await asyncio.sleep(0)
        return sent

    def _unanswered(self, held: bool = True) -> list[Sent]:
        return [sent for sent in self.sent if not sent.task.done() and (held or not sent.held)]

    async def _aborted(self, victims: list[Sent]) -> None:
        for sent in victims:
            sent.aborted = True
        if len(victims) == 1:
            await self.engine.async_abort(victims[0].rid)
        elif victims:
            await self.engine.async_abort(abort_all=True)
        if self.paused:  # no step would end them
            await self._all_answered([sent for sent in victims if not sent.held])

    async def _flushed(self, success: bool) -> None:
        before = self._unanswered(held=False)
        if success:
            await self._all_answered(before)
        else:
            assert before or self.paused, "an idle engine's cache was not flushed"

    async def _check_layout(self) -> None:
        assert (await self.engine.async_health())["layout"] == self.layout

    async def _forward_steps(self) -> int:
        return (await self.engine.async_health())["ranks"][0]["forward_ct"]

    async def _all_answered(self, sent: Sequence[Sent]) -> None:
        """Nothing is in flight any more, so the answers are on their way."""
        await asyncio.wait_for(asyncio.gather(*(one.task for one in sent)), DEADLINE_S)

    async def _answer(self, sent: Sent) -> dict[str, Any]:
        return await asyncio.wait_for(asyncio.shield(sent.task), DEADLINE_S)

    async def _end(self) -> None:
        """Bring the engine back, wait for every answer, and look for anything left behind."""
        if self.paused:
            await self.go_on()
        await self.resume(("kv_cache", "weights"))
        if not self.weights:
            await self.update(False)
        for sent in self.sent:
            self._check(sent, await self._answer(sent))
        health = await self.engine.async_health()
        assert (health["inflight"], health["ok"], health["layout"]) == (0, True, self.layout)
        assert self.engine.live_ids() == []
        for _ in range(100):  # the step that was launched before the last request ended may not be over
            if await self.engine.flush():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("KV is left behind: the idle engine's cache cannot be flushed")

    def _check(self, sent: Sent, answer: dict[str, Any]) -> None:
        reason, tokens = answer["meta_info"]["finish_reason"], answer["output_ids"]
        expected, ended = self.reference[sent.prompt][: sent.tokens], reason["type"] == "abort"
        refusals = {"already in use": sent.duplicate, "released": sent.raced, sent.closed: bool(sent.closed)}
        if ended and not tokens and any(may and words in reason["message"] for words, may in refusals.items()):
            return
        assert sent.aborted or not sent.closed, f"{sent.rid} was let in, {sent.closed}: {answer}"
        if sent.aborted and ended:
            assert tokens == expected[: len(tokens)]
        else:
            assert (reason["type"], tokens) == ("length", expected), f"{sent.rid} got {tokens}, {expected} is right"


_EVENTS: dict[type, Callable[..., Coroutine[Any, Any, None]]] = {
    script.Submit: Play.submit,
    script.Again: Play.again,
    script.Bad: Play.bad,
    script.Abort: Play.abort,
    script.AbortAll: Play.abort_all,
    script.Switch: Play.switch,
    script.Pause: Play.pause,
    script.Continue: Play.go_on,
    script.Flush: Play.flush,
    script.Update: Play.update,
    script.Release: Play.release,
    script.Resume: Play.resume,
    script.Steps: Play.steps,
}


def _message(answer: dict[str, Any]) -> str:
    return answer["meta_info"]["finish_reason"]["message"]


async def _last_chunk(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """The answer. Of a stream the last chunk, after a check that it has one end, no gap and no repeat."""
    if not request["stream"]:
        return await engine.async_generate(**request)
    last: dict[str, Any] = {}
    async for chunk in await engine.async_generate(**request):
        if last:
            assert last["meta_info"]["finish_reason"] is None, "a stream went on after its end"
            assert chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        last = chunk
    assert last and last["meta_info"]["finish_reason"] is not None, "a stream stopped without an end"
    return last
