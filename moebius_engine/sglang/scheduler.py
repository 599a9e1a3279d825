"""SGLang's scheduler with both layouts. Only its override points stand here; what they do has a module each."""

import logging
import time
from collections import deque
from collections.abc import Callable

from sglang.srt.managers.io_struct import AbortReq, GetLoadsReqInput, GetLoadsReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.server_args import ServerArgs

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.sglang import footprint
from moebius_engine.sglang.control_messages import ControlMessages
from moebius_engine.sglang.delivery import NumberingSocket
from moebius_engine.sglang.dispatch import report_load
from moebius_engine.sglang.intake import Intake
from moebius_engine.sglang.occupation import Occupation
from moebius_engine.sglang.payoff_check import PayoffCheck
from moebius_engine.sglang.roster import end_aborted, report
from moebius_engine.sglang.scheduler_state import attach_scheduler_state
from moebius_engine.sglang.settle import settle
from moebius_engine.sglang.switcher import Switcher
from moebius_engine.sglang.trace import Trace, refused_switch
from moebius_engine.sglang.worker import SwitchingWorker
from moebius_engine.switch.policy import Policy
from moebius_engine.switch.room import no_room
from moebius_engine.switch.step_clock import StepClock
from moebius_engine.telemetry import SwitchReason
from moebius_engine.vitals import Activity

log = logging.getLogger(__name__)


class SwitchingScheduler(ControlMessages):
    """One rank's scheduler. `tp_server_args` and `config` are set on a subclass by table.switching_hooks."""

    tp_server_args: ServerArgs
    config: SwitchConfig
    chunked_req: Req | None
    waiting_queue: list[Req]

    def __init__(self, *args, **kwargs):
        self.layout = Layout.EP
        self.parked: deque[Req] = deque()
        super().__init__(*args, **kwargs)
        self.layouts = self.tp_worker.layouts
        self.delivery = NumberingSocket(self.send_to_detokenizer.socket, self.tp_rank)
        self.send_to_detokenizer.socket = self.delivery
        attach_scheduler_state(self)
        self.layouts[Layout.EP].select(self)
        self.intake = Intake(self)
        self.inbox = self.intake.inbox
        self.trace = Trace(self.tp_size)
        self.expert_load = self.layouts[Layout.EP].runner.expert_load
        self.switch_policy, self.step_clock = Policy(self.config), StepClock()
        self.payoff_check: PayoffCheck | None = None  # rank 0's, from a calibration on
        self.switcher = Switcher(self)
        self.occupation = Occupation(self)
        self.tp_worker.before_writing = self._before_weights_are_written
        self.tokens_generated = 0
        if self.tp_rank == 0:
            log.info("memory of rank 0:\n%s", footprint.describe(footprint.footprint(self)))
        if self.config.policy == "tp":
            self.result_queue: deque = deque()  # which the event loop makes only when it starts
            self.switch(Layout.TP, "step")
            self.trace.begin(step=0)

    def init_tp_model_worker(self) -> None:
        self.tp_worker = SwitchingWorker(
            server_args=self.server_args,
            gpu_id=self.gpu_id,
            tp_rank=self.tp_rank,
            moe_ep_rank=self.moe_ep_rank,
            pp_rank=self.pp_rank,
            attn_cp_rank=self.attn_cp_rank,
            moe_dp_rank=self.moe_dp_rank,
            dp_rank=self.dp_rank,
            nccl_port=self.nccl_port,
            tp_server_args=self.tp_server_args,
            config=self.config,
        )

    def event_loop_normal(self) -> None:
        self.switcher.take_scratch()  # here, on the stream on which the loop switches
        super().event_loop_normal()

    def event_loop_overlap(self) -> None:
        self.switcher.take_scratch()
        super().event_loop_overlap()

    # ---- every step: receive, decide, switch

    def recv_requests(self) -> list:
        if self.tp_rank == 0:
            self.step_clock.turn(time.monotonic(), self.layout, self._decoding())
        return self.intake.receive()

    def process_input_requests(self, recv_reqs: list) -> None:
        super().process_input_requests(recv_reqs)
        super().process_input_requests(self.intake.arrived())

    def decide(self, inflight: int) -> Layout | None:
        """Rank 0, before each exchange: the layout to switch to. inflight: requests of all ranks."""
        self.trace.sample(self.inbox.layout, self.inbox.headers, inflight)
        decision = self.switch_policy.observe(time.monotonic(), inflight, self.layout)
        if decision and self.payoff_check and not self.payoff_check.allows(decision, inflight):
            return None
        return decision

    def _decoding(self) -> int:
        """Requests of all ranks if all of them decode, as far as the last exchange and rank 0's last batch say."""
        batch = self.last_batch
        # Idle: rank 0 has none of them itself, and takes part in the step.
        if batch is None or not (batch.forward_mode.is_decode() or batch.forward_mode.is_idle()):
            return 0
        inflight = self.inbox.inflight()
        return inflight if inflight == self.inbox.running() else 0

    def _no_room(self, target: Layout) -> str | None:
        """By what all ranks have last heard, so the same on all. A prefix that requests of several ranks share counts
        once for each, and what has come in since does not: the plan (Switcher.prepare) is exact."""
        if target == Layout.EP:
            return None  # a request that does not fit there waits
        return no_room(target, self.intake.held(), self.layouts[target].capacity)

    def requests_in_flight(self) -> list[Req]:
        """Requests of this rank that have not finished, in any state."""
        requests = {id(req): req for req in self.running_batch.reqs}
        if self.last_batch is not None:
            requests |= {id(req): req for req in self.last_batch.reqs}
        if self.chunked_req is not None:
            requests[id(self.chunked_req)] = self.chunked_req
        queued = (*self.parked, *self.waiting_queue, *self.grammar_manager.grammar_queue)
        requests |= {id(req): req for req in queued}
        return [req for req in requests.values() if not req.finished()]

    def get_next_batch_to_run(self):
        decision = self.inbox.headers[0].decision
        if decision:
            target = list(Layout)[decision - 1]
            if target != self.layout:
                self.switch(target, "policy")
        if self.closed:
            settle(self)  # an unmerged prefill batch would be lost with the step
            end_aborted(self)
            return None
        if self.chunked_req is None and self.parked:
            self.chunked_req = self.parked.popleft()
            self._chunked_req_scheduled_last_iter = False
        if not self.parked:
            return super().get_next_batch_to_run()
        # SGLang does not know of the room that parked prompts still need: nothing newer is admitted before them.
        newer, self.waiting_queue = self.waiting_queue, []
        batch = super().get_next_batch_to_run()
        self.waiting_queue += newer  # after those that were retracted just now
        return batch

    def switch(self, target: Layout, reason: SwitchReason, with_weights: bool = True):
        """Switch now, on all ranks in the same step. Returns the SwitchRecord.

        with_weights: False only with a full set of weights in place, nothing in flight, and a full update to follow;
        then the KV cache may have been released too.
        """
        if with_weights and (refusal := self.closed or self._no_room(target)):
            record = refused_switch(self, target, reason, refusal)
        else:
            with self.doing(Activity.SWITCHING):
                record = self.switcher.run(target, reason, with_weights)
        self.step_clock.interrupted()
        self.inbox.forget_decision()
        if record.refused:
            self.switch_policy.refused(time.monotonic())
        else:
            self.switch_policy.switched(time.monotonic())
            if self.payoff_check and record.running:
                self.payoff_check.switched(record)
            if self.layout == Layout.EP:
                self.stream_output_generation([], False, is_idle_batch=True)  # tells the controller who has how many
        self.trace.switched(record)
        return record

    def _before_weights_are_written(self) -> None:
        """A full update replaces every weight: with nothing in flight, load it into EP, moving nothing."""
        if self.layout == Layout.TP and self.tp_worker.weights.complete and not self.requests_on_all_ranks():
            self.switch(Layout.EP, "step", with_weights=False)

    # ---- requests

    def handle_generate_request(self, recv_req) -> None:
        super().handle_generate_request(recv_req)
        if self.closed:
            self._end_waiting(lambda req: req.rid == recv_req.rid, self.closed)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        super()._add_request_to_queue(req, is_retracted)
        if isinstance(req.to_finish, FINISH_ABORT) and not is_retracted:
            # Found bad on the way, such as what is no grammar. Upstream's answer would fail the whole batch.
            self._end_waiting(lambda other: other is req, req.to_finish.message)

    def _end_waiting(self, hit: Callable[[Req], bool], message: str | None = None) -> None:
        """Abort waiting requests with the tokens that they have: a retracted one may have some.

        As a finished request and not by upstream's AbortReq, which drops those tokens and leaves the request in the
        tokenizer's table for ever.
        """
        manager = self.grammar_manager
        ended = [req for req in (*self.waiting_queue, *manager.grammar_queue) if hit(req)]
        self.waiting_queue = [req for req in self.waiting_queue if not hit(req)]
        manager.grammar_queue = [req for req in manager.grammar_queue if not hit(req)]
        for req in ended:
            req.finished_reason = FINISH_ABORT(message)
        report(self, ended)

    def init_req_max_new_tokens(self, req: Req) -> None:
        """Admit by EP's limits in both layouts, so that a request accepted in TP fits on one EP rank."""
        super().init_req_max_new_tokens(req)
        page = self.page_size
        rows = self.layouts[Layout.EP].runner.max_total_num_tokens
        room = rows - -(-len(req.origin_input_ids) // page) * page - page - 1
        req.sampling_params.max_new_tokens = max(0, min(req.sampling_params.max_new_tokens, room))

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort exactly the request named: upstream also aborts every id that the given one is a prefix of."""

        def hit(req: Req) -> bool:
            return recv_req.abort_all or req.rid == recv_req.rid

        self._end_waiting(hit)
        # The others finish in their next step, which frees their KV.
        for req in filter(hit, self.requests_in_flight()):
            req.to_finish = FINISH_ABORT()
        if self._engine_paused:
            settle(self)
            end_aborted(self)

    def process_batch_result(self, batch, result) -> None:
        done_before = sum(req.finished() or req.is_retracted or req.is_chunked > 0 for req in batch.reqs)
        running = [req for req in batch.reqs if not req.finished()] if self.payoff_check else ()
        super().process_batch_result(batch, result)
        for req in running:
            if req.finished() and self.payoff_check:
                self.payoff_check.finished(req)
        if not batch.forward_mode.is_idle() and (self.layout == Layout.EP or self.tp_rank == 0):
            self.tokens_generated += len(batch.reqs) - done_before

    def get_loads(self, req: GetLoadsReqInput | None = None) -> GetLoadsReqOutput:
        loads = super().get_loads(req)
        if self.layout == Layout.EP:  # in TP it does not matter which rank receives a request
            report_load(loads, held=len(self.requests_in_flight()), received=self.intake.received)
        return loads

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return not self.parked and super().is_fully_idle(for_health_check)
