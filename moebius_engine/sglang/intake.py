"""How a rank takes in messages: from its sockets, through the exchange of all ranks, into its scheduler."""

import time
from typing import Any

import zmq
from sglang.srt.managers.io_struct import BlockReqInput, ProfileReq

from moebius_engine.layout import Layout
from moebius_engine.sglang.handover import rows_to_fill
from moebius_engine.sglang.inbox import Header, Inbox
from moebius_engine.sglang.pace import Pace
from moebius_engine.switch.room import Held

_IDLE_STEPS = 100  # steps without work after which an idle engine sleeps between polls,
_IDLE_SLEEP_S = 1e-5  # longer with every step,
_MOST_IDLE_SLEEP_S = 0.005  # up to this

# The controller sends these to every worker, and all other control messages to one.
_TO_ALL = (BlockReqInput, ProfileReq)


class Intake:
    """scheduler: the SwitchingScheduler of this rank.

    received: requests taken from the sockets since the start.
    """

    def __init__(self, scheduler):
        self._s = scheduler
        self.inbox, self._pace = Inbox(scheduler.tp_worker.host_group), Pace()
        self.received = self._idle_steps = 0
        self._arrived: list[Any] = []  # requests of this rank alone, which come after the step's messages
        self._late: list[Any] = []  # those that a switch to TP came before: for the next exchange

    def receive(self) -> list[Any]:
        """The messages that this step begins with: in EP control messages that all ranks handle in the same step, in TP
        these and the requests of all ranks. What of them this rank handles alone, `arrived` has."""
        s = self._s
        if not self._pace.is_due():
            return []
        messages = self.inbox.receive(s.layout)  # of the exchange under way: there is none in TP
        inflight = self.inbox.inflight()
        decision = s.decide(inflight) if s.tp_rank == 0 else None
        work, control = s._split_work_and_control_reqs(self._drain_sockets())
        if s.tp_rank != 0:  # rank 0's copy goes to all
            control = [message for message in control if not isinstance(message, _TO_ALL)]
        self.received += len(work)
        work, self._late = self._late + work, []
        self.inbox.send(s.layout, work, control, self._header(len(work), len(control), decision))
        if s.layout == Layout.TP:
            # The ranks go in step anyhow, so they wait for the exchange, and need not keep a request until the next.
            received = self.inbox.receive(s.layout)
            requests = self.inbox.arriving()  # first, so that a message about one finds it
            messages = received[:requests] + messages + received[requests:]
        else:
            self._arrived = work
        self._pace.exchanged(self.inbox.headers[0].skip)
        self._idle_steps = 0 if messages or work or control or inflight else self._idle_steps + 1
        if self._idle_steps > _IDLE_STEPS:
            time.sleep(min(_MOST_IDLE_SLEEP_S, _IDLE_SLEEP_S * self._idle_steps))
        return messages

    def arrived(self) -> list[Any]:
        """Once the step's messages are handled: the requests that this rank has received. In EP they come after control
        messages of the last exchange, whose headers do not count them. A message that has led to TP leaves them for the
        next exchange, since there all ranks must get them."""
        arrived, self._arrived = self._arrived, []
        if self._s.layout == Layout.EP:
            return arrived
        self._late += arrived
        return []

    def _drain_sockets(self) -> list[Any]:
        received = []
        for socket in (self._s.recv_from_tokenizer, self._s.recv_from_rpc):
            while True:
                try:
                    received.append(socket.recv_pyobj(zmq.NOBLOCK))
                except zmq.Again:
                    break
        return received

    def _header(self, work: int, control: int, decision: Layout | None) -> Header:
        s = self._s
        requests, admitted = s.requests_in_flight(), 0 if s.layout == Layout.TP or s.closed else work
        running = len(requests) - len(s.waiting_queue) - len(s.grammar_manager)
        skip = 0
        if s.tp_rank == 0:
            arriving = work + control + sum(header.work + header.control for header in self.inbox.headers)
            skip = self._pace.skip(time.monotonic(), quiet=bool(requests) and not arriving)
        return Header(
            work=work,
            control=control,
            inflight=len(requests) + admitted,
            running=running,
            tokens=s.tokens_generated,
            decision=0 if decision is None else 1 + list(Layout).index(decision),
            skip=skip,
            rows=self._rows(),
        )

    def _rows(self) -> int:
        """KV rows that live requests of this rank take, and those that half-prefilled ones still need."""
        s = self._s
        filling = [*s.parked, *([] if s.chunked_req is None else [s.chunked_req])]
        allocator = s.token_to_kv_pool_allocator
        taken = allocator.size - allocator.available_size() - s.tree_cache.evictable_size()
        return taken + rows_to_fill(filling, s.page_size)

    def held(self) -> list[Held]:
        """By the headers of the last exchange, so the same on every rank: what each one holds."""
        return [Held(header.running, header.rows) for header in self.inbox.headers]
