"""One rank's steps of a switch: the protocol of switch/coordinator.py on SGLang's scheduler."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from moebius_engine.exchange import agree
from moebius_engine.layout import Layout
from moebius_engine.layout.plan import Block, RowMove, kv_blocks
from moebius_engine.memory.scratch import Scratch
from moebius_engine.sglang import grammars, handover, kv_rows, placement, requests, row_moves
from moebius_engine.sglang.aside import Aside
from moebius_engine.sglang.grammars import Grammars
from moebius_engine.sglang.handover import Handover
from moebius_engine.sglang.kv_check import Digests, differences, kv_digests
from moebius_engine.sglang.kv_rows import Occupied
from moebius_engine.sglang.landing import Landing
from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.placement import Place
from moebius_engine.sglang.random_streams import draw_anew
from moebius_engine.sglang.roster import Roster, read_roster, retract, write_roster
from moebius_engine.sglang.settle import settle
from moebius_engine.switch.coordinator import run_switch
from moebius_engine.switch.faults import FaultySteps
from moebius_engine.switch.garbage import no_garbage_collection
from moebius_engine.switch.room import Held, no_room
from moebius_engine.telemetry import SwitchReason, SwitchRecord

log = logging.getLogger(__name__)


@dataclass
class Plan:
    """What this rank does for one switch."""

    target: Layout
    roster: Roster = field(default_factory=Roster)  # this rank's requests, as settle left them
    everyone: list[Any] = field(default_factory=list)  # to TP: what handover.share has brought
    union: Roster = field(default_factory=Roster)  # requests of all ranks; this rank's until it knows the others'
    handover: Handover = field(default_factory=lambda: Handover(Roster(), [], 0.0))
    places: list[list[Place]] = field(default_factory=list)  # by destination rank; for TP one list, the same on all
    occupied: Occupied = field(default_factory=lambda: Occupied([], torch.empty(0)))
    moves: list[RowMove] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    landing: Landing | None = None
    grammars: Grammars = field(default_factory=Grammars)
    before: Digests | None = None  # with check_bytes, once the rank is prepared

    def own_places(self, rank: int) -> list[Place]:
        return self.places[0 if self.target == Layout.TP else rank]


class Switcher:
    """scheduler: the SwitchingScheduler of this rank."""

    def __init__(self, scheduler):
        self._s = scheduler
        self._rank, self._ranks = scheduler.tp_rank, scheduler.tp_size
        self._shape = scheduler.tp_worker.shape
        self._group = scheduler.tp_worker.host_group
        self._agree = partial(agree, group=self._group)
        self._mover = scheduler.tp_worker.mover
        tokens = max(state.allocator.size for state in scheduler.layouts.values())
        device = torch.device(scheduler.device)
        self.scratch, self._aside = Scratch(device, tokens), Aside(device)
        self.faults: FaultySteps | None = None
        if scheduler.config.inject_faults:
            self.faults = FaultySteps(self, self._rank, lambda fault: self._mover.spoil(fault.kind, fault.layer))
        self._switches = 0
        self._plan: Plan | None = None
        self._until_the_end = ExitStack()  # of a switch

    def take_scratch(self) -> None:
        """Call it on the stream on which run() will be called."""
        self.scratch.fill(large=False)
        self._aside.begin()
        with self._aside.used():
            self.scratch.fill(large=True)

    def run(self, target: Layout, reason: SwitchReason, with_weights: bool = True) -> SwitchRecord:
        """Switch all ranks. Collective. See coordinator.run_switch."""
        s, source, began, started = self._s, self._s.layout, time.perf_counter(), self._s.trace.elapsed_s()
        self._plan = Plan(target)
        self._mover.journal.clear()  # also of the moves that the start has made
        with no_garbage_collection(), self._until_the_end:
            outcome = run_switch(self.faults or self, self._agree, target, with_weights=with_weights)
        total = 1e3 * (time.perf_counter() - began)
        decide, metadata, kv, weights = (outcome.ms.get(name, 0.0) for name in ("decide", "metadata", "kv", "weights"))
        plan = self._require_plan()
        record = SwitchRecord(
            source=source.value,
            target=target.value,
            reason=reason,
            step=s.trace.step,
            forward_ct=s.forward_ct,
            started_at_s=started,
            running=len(plan.union.running),
            waiting=len(plan.union.waiting),
            prefilling=len(plan.union.prefilling),
            kv_tokens=sum(move.tokens for move in plan.moves),
            decide_ms=decide,
            metadata_ms=metadata,
            kv_ms=kv,
            weights_ms=weights,
            rest_ms=total - (decide + metadata + kv + weights),
            total_ms=total,
            checks_ms=outcome.ms.get("checks", 0.0),
            kv_bytes=outcome.kv_bytes,
            weight_bytes=outcome.weight_bytes,
            refused=outcome.refused,
        )
        self._plan = None
        if self._rank == 0:
            log.info("switch %s", record.model_dump_json())
        return record

    def _require_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("no switch is planned")
        return self._plan

    # ---- Steps

    def settle(self) -> None:
        settle(self._s)
        # Not before: a request that ends there makes SGLang copy its list of free rows, as after any step.
        self._until_the_end.enter_context(self.scratch.used())
        plan = self._require_plan()
        plan.roster = plan.union = read_roster(self._s)
        self._aside.begin()

    def move_weights(self, target: Layout) -> int:
        return self._mover.move_experts(target)

    def share(self, target: Layout) -> None:
        if target == Layout.TP:
            plan = self._require_plan()
            plan.everyone = handover.share(plan.roster, self._s.new_token_ratio, self._group)

    def prepare(self) -> str | None:
        with self._aside.used():
            return self._prepare()

    def _prepare(self) -> str | None:
        s, plan = self._s, self._require_plan()
        source, destination, page = s.layouts[s.layout], s.layouts[plan.target], s.page_size
        if plan.target == Layout.TP:
            given = handover.gather(plan.roster, plan.everyone, self._rank, s.tokenizer)
            plan.union = given.roster
        else:
            limits = destination.capacity
            given = handover.divide(plan.roster, s.new_token_ratio, self._rank, self._ranks, limits, page)
        plan.handover, plan.places = given, [placement.plan_places(held, page) for held in given.held]
        own = plan.own_places(self._rank)
        rows = placement.rows_needed(own, page)
        rows += handover.rows_to_fill(given.roster.prefilling, page)
        if refusal := no_room(plan.target, [Held(len(own), rows)], destination.capacity):
            return refusal
        # Other ranks may wait for this one: half of what their collectives have.
        plan.grammars = grammars.build(s.grammar_manager.grammar_backend, given.roster.all, s.config.timeout_s / 2)
        if plan.target == Layout.TP:
            plan.occupied = kv_rows.occupy(destination, own, page)
            plan.moves = row_moves.to_tp(source, self._by_ep_rank(plan), plan.occupied, self._rank)
        else:
            new_rows = [kv_rows.moved_elsewhere(destination, part, page) for part in plan.places]
            plan.occupied = kv_rows.occupy(destination, own, page)
            plan.moves = row_moves.to_ep(source, plan.places, new_rows)
        plan.blocks = kv_blocks(self._shape, self._ranks, plan.target, plan.moves)
        self._mover.prepare_kv(plan.blocks, plan.target)
        plan.landing = Landing(destination, own, plan.occupied, given.roster.prefilling)
        plan.landing.plant()
        if s.config.check_bytes:
            plan.before = self._digests_before(plan)
        return None

    def move_kv(self) -> int:
        plan = self._require_plan()
        return self._mover.move_kv(plan.blocks, plan.target)

    def finish(self) -> dict[str, float]:
        return self._mover.finish()

    def roll_back(self) -> None:
        s, plan = self._s, self._require_plan()
        if self._mover.journal.holds("kv"):
            # All KV of live requests: also what was not moved because another request's rows provided it.
            plan.moves = self._whole_moves(plan)  # the rows must live until finish()
            self._mover.return_kv(kv_blocks(self._shape, self._ranks, s.layout, plan.moves), s.layout)
            # Cached prefixes that no request holds were overwritten, and so were requests that were not placed.
            retract(s, plan.handover.retracted)
            tree = s.layouts[s.layout].tree
            tree.evict(EvictParams(num_tokens=tree.evictable_size()))
        self._mover.return_experts(s.layout)
        self._mover.finish()
        if s.config.check_bytes:
            # No rank has moved KV before all were prepared.
            lost = plan.before is not None and self._digests_before(plan) != plan.before
            if fault := self._agree("KV is not what it was before the switch" if lost else None):
                raise RuntimeError(f"rolled back, but {fault}")

    def verify(self) -> str | None:
        if not self._s.config.check_bytes:
            return None
        plan = self._require_plan()
        placed = list(zip(plan.own_places(self._rank), plan.occupied.slots, strict=True))
        after = self._digests(self._s.layouts[plan.target], placed)
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, (plan.before, after), group=self._group)
        wrong = differences([b for b, _ in everyone], [a for _, a in everyone])
        return f"KV of {len(wrong)} (request, head) pairs differs after the move, first {wrong[0]}" if wrong else None

    def commit(self) -> None:
        s, plan = self._s, self._require_plan()
        source, destination = s.layouts[s.layout], s.layouts[plan.target]
        for req in plan.handover.retracted:
            req.reset_for_retract()
        for req in plan.handover.roster.waiting:
            requests.forget_place(req)
        assert plan.landing is not None
        plan.landing.settle_in()
        self._clear(source)
        destination.select(s)
        s.new_token_ratio = plan.handover.new_token_ratio
        grammars.hand_out(s.grammar_manager.grammar_backend, plan.handover.roster.all, plan.grammars, plan.target)
        write_roster(s, plan.handover.roster)
        s.delivery.switched()
        self._switches += 1
        draw_anew(s.random_seed, self._switches, plan.target, self._rank)

    def abandon(self) -> None:
        self._clear(self._s.layouts[self._require_plan().target])

    def _clear(self, state: LayoutState) -> None:
        self._aside.begin()
        with self._aside.used():  # where there is memory for a large tensor: all rows are free
            state.clear()

    def _by_ep_rank(self, plan: Plan) -> list[list[Place]]:
        if plan.target == Layout.EP:
            return plan.places
        return row_moves.by_ep_rank(plan.places[0], self._ranks)

    def _whole_moves(self, plan: Plan) -> list[RowMove]:
        """Every KV row of every placed request, from where the switch has put it to where it was."""
        layouts, placed = self._s.layouts, self._by_ep_rank(plan)
        slots = {
            self._s.layout: {id(place): place.req.req_pool_idx for part in placed for place in part},
            plan.target: dict(zip(map(id, plan.own_places(self._rank)), plan.occupied.slots, strict=True)),
        }
        return row_moves.whole(layouts[Layout.EP], layouts[Layout.TP], placed, slots, self._rank)

    def _digests_before(self, plan: Plan) -> Digests:
        """Of the KV that this rank holds in the source."""
        placed = self._by_ep_rank(plan)
        read = placed[self._rank] if plan.target == Layout.TP else [place for part in placed for place in part]
        return self._digests(self._s.layouts[self._s.layout], [(place, place.req.req_pool_idx) for place in read])

    def _digests(self, state: LayoutState, placed: list[tuple[Place, int]]) -> Digests:
        return kv_digests(state, placed, self._rank, self._ranks, self._shape)
