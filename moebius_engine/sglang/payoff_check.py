"""Rank 0 asks whether a switch that the policy wants is expected to earn its cost."""

from sglang.srt.managers.schedule_batch import Req

from moebius_engine.calibration.store import Calibration
from moebius_engine.calibration.times import MeasuredTimes
from moebius_engine.layout import Layout, other
from moebius_engine.switch.payoff import Payoff
from moebius_engine.telemetry import SwitchRecord


class PayoffCheck:
    """scheduler: rank 0's. In EP it sees its own requests only, and takes them for a sample of all."""

    def __init__(self, scheduler, calibration: Calibration):
        self._s = scheduler
        self._times = MeasuredTimes(
            calibration.points, calibration.switches, calibration.setting.context, calibration.longer
        )
        self._payoff = Payoff(self._times)
        self._answered: tuple[int, bool] = (0, True)  # for which count, how: an estimate takes milliseconds

    def begin_step(self) -> None:
        self._payoff.begin_step()
        self._answered = (0, True)

    def finished(self, req: Req) -> None:
        self._payoff.finished(len(req.output_ids))

    def switched(self, record: SwitchRecord) -> None:
        self._times.switched(record)

    def allows(self, target: Layout, inflight: int) -> bool:
        """Whether to switch to `target` now. inflight: of all ranks. The trace keeps the estimate."""
        if self._answered[0] == inflight or not (requests := self._s.requests_in_flight()):
            return self._answered[1]
        tokens = sum(len(req.origin_input_ids) + len(req.output_ids) for req in requests)
        estimate = self._payoff.estimate(
            other(target),
            inflight,
            generated=[len(req.output_ids) for req in requests],
            kv_tokens=tokens * inflight / len(requests),
            cap=max(1, *(req.sampling_params.max_new_tokens for req in requests)),
        )
        self._s.trace.estimated(estimate)
        self._answered = (inflight, estimate.pays)
        return estimate.pays
