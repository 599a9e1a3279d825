"""Does switching pay on this hardware? The cost model, the memory budget and the simulator, asked together."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from moebius_engine.calibration.store import read
from moebius_engine.config import SwitchConfig
from moebius_engine.costmodel.costs import CostModel
from moebius_engine.costmodel.crossing import Crossing, crossing
from moebius_engine.costmodel.decode import Dispatch
from moebius_engine.costmodel.fit import FREE, Fit, fit, step_observation
from moebius_engine.costmodel.hardware import Cluster
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.costmodel.paper import MEM_FRACTION, paper_fit
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import check_ranks
from moebius_engine.memory.budget import GB, Budget
from moebius_engine.telemetry import read_json_lines
from rollout.budget_cli import Question, answer, read_config
from rollout.demo import NORMAL_P99, PAPER_MEDIAN, PAPER_P99
from rollout.replay.request import RecordedRequest
from rollout.simulate.machine import from_costs
from rollout.simulate.replica import simulate
from rollout.simulate.trace import PROMPT_MEDIAN, step_of

LEAST_GAIN = 1.02
"""Below it: do not bother. Holding a second layout takes 2 to 3 % of a GPU from the KV cache."""


@dataclass(frozen=True)
class Wish:
    """What the plan is for. batch: requests of a rollout step. cap: tokens of a response. lengths: of responses seen
    before, in tokens; the paper's distribution if left out. calibration: a file of measured step times to fit to.

    Raises ValueError naming what cannot be.
    """

    model: str
    gpu: str
    ranks: int
    batch: int
    cap: int
    link: str = "nvlink"
    dispatch: Dispatch = "none"
    skew: float = 1.0
    prompt: int = PROMPT_MEDIAN
    lengths: Sequence[int] | None = None
    calibration: Path | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "cap", "prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.batch < self.ranks:
            raise ValueError(f"batch={self.batch} leaves no request to each of ranks={self.ranks}")
        if self.lengths is not None and (longest := max(self.lengths)) > self.cap:
            raise ValueError(f"lengths hold a response of {longest} tokens, above cap={self.cap}: give a higher cap")


@dataclass(frozen=True)
class Plan:
    """The answer. switch_s: seconds by target, at switch_at, (requests, KV tokens). budget: of one rank, None if the
    model leaves no room. step_s: seconds of a rollout step by policy ("ep", "tp", "rollout"; the last only if there is
    a crossing), empty if it does not fit. verdict: in words."""

    wish: Wish
    fit: Fit
    crossing: Crossing
    switch_s: dict[Layout, float]
    switch_at: tuple[int, int]
    budget: Budget | None
    step_s: dict[str, float]
    verdict: str

    @property
    def gain(self) -> float | None:
        """The better static layout's seconds over those with switching; None if there is nothing to switch."""
        if "rollout" not in self.step_s:
            return None
        return min(self.step_s["ep"], self.step_s["tp"]) / self.step_s["rollout"]


def make_plan(wish: Wish) -> Plan:
    """Raises ValueError for a wish that no engine could meet, but for one that lacks only memory."""
    config = read_config(wish.model)
    if (longest := wish.prompt + wish.cap) > (positions := config["max_position_embeddings"]):
        raise ValueError(
            f"prompt={wish.prompt} and cap={wish.cap} need {longest} tokens, and the model has {positions} positions: "
            "give a lower cap"
        )
    cluster = Cluster.of(wish.gpu, wish.ranks, wish.link)
    achieved = paper_fit().costs.achieved
    costs = CostModel(MoeModel.from_hf_config(config), cluster, achieved, wish.dispatch, wish.skew)
    check_ranks(costs.model.shape, wish.ranks)
    found = paper_fit() if wish.calibration is None else _fit_calibration(costs, wish.calibration)
    costs = replace(costs, achieved=found.costs.achieved)
    responses = response_lengths(wish)
    crossed = crossing(costs, _context(responses, wish.prompt), wish.batch)
    requests = round(crossed.requests or wish.batch)
    kv_tokens = round(requests * _context(responses, wish.prompt)(requests))
    switch_s = {target: costs.switch_s(target, requests, kv_tokens) for target in Layout}
    made = Plan(wish, found, crossed, switch_s, (requests, kv_tokens), None, {}, "")
    try:
        made = replace(made, budget=_budget(wish, cluster))
        made = replace(made, step_s=_step_seconds(wish, costs, crossed, responses))
    except ValueError as error:  # of the memory: everything else was checked above
        return replace(made, verdict=f"does not fit: {error}")
    return replace(made, verdict=_verdict(made))


def response_lengths(wish: Wish) -> list[int]:
    """`batch` response lengths in tokens, rising: the middles of as many equal parts of the distribution.

    The paper's is a lognormal with median 1,510 and p99 10,386, cut at the cap (arXiv 2606.26607, section 6.3).
    """
    middles = (np.arange(wish.batch) + 0.5) / wish.batch
    if wish.lengths is None:
        spread = np.log(PAPER_P99 / PAPER_MEDIAN) / NORMAL_P99
        lengths = PAPER_MEDIAN * np.exp(spread * np.array([NormalDist().inv_cdf(p) for p in middles]))
    else:
        lengths = np.quantile(wish.lengths, middles, method="inverted_cdf")
    return np.clip(np.round(lengths), 1, wish.cap).astype(int).tolist()


def read_lengths(path: Path) -> list[int]:
    """Response lengths of a step that was recorded (rollout/replay). Raises ValueError for a file without any."""
    lengths = [len(request.output_ids) for request in read_json_lines(path, RecordedRequest)]
    if not lengths:
        raise ValueError(f"{path} holds no requests")
    return lengths


def _context(responses: Sequence[int], prompt: int) -> Callable[[float], float]:
    """KV tokens of a request while n of a step are in flight: those that are left are as long as the longest that has
    ended."""
    ended = [0, *responses]
    return lambda inflight: prompt + ended[max(0, len(responses) - int(inflight))]


def _fit_calibration(costs: CostModel, path: Path) -> Fit:
    made = read(path)
    for name, measured, asked in (
        ("ranks", made.setting.ranks, costs.cluster.ranks),
        ("model", dict(made.setting.model), asdict(costs.model.shape)),
    ):
        if measured != asked:
            raise ValueError(f"{path} was measured with {name}={measured}, and the plan is for {name}={asked}")
    observations = [
        step_observation(Layout(point.layout), point.requests, context, point.step_s)
        for context, points in made.by_context
        for point in points
    ]
    # The dispatch floor plays no part in "none".
    return fit(costs, observations, [name for name in FREE if costs.dispatch != "none" or name != "dispatch_floor_s"])


def _budget(wish: Wish, cluster: Cluster) -> Budget:
    return answer(
        Question(
            wish.model,
            wish.ranks,
            gpu_memory=cluster.gpu.memory / GB,
            mem_fraction=MEM_FRACTION,
            max_running_requests=wish.batch,
            context_length=wish.prompt + wish.cap,
            transfer="direct" if cluster.hosts == 1 else "collective",
        )
    )


def _step_seconds(wish: Wish, costs: CostModel, crossed: Crossing, responses: Sequence[int]) -> dict[str, float]:
    """Simulated, all requests at once. A switching engine begins in EP: the weight update before the step goes back to
    it and moves nothing."""
    machine = from_costs(wish.model, costs, wish.prompt + wish.cap, wish.batch, MEM_FRACTION)
    trace = step_of("plan", responses, wish.cap, wish.prompt)
    runs = [(SwitchConfig(policy="ep"), Layout.EP), (SwitchConfig(policy="tp"), Layout.TP)]
    limits = [machine.static[layout] for _, layout in runs]
    if crossed.requests is not None:
        runs.append((SwitchConfig(policy="rollout", threshold=max(1, round(crossed.requests))), Layout.EP))
        limits.append(machine.switching)
    return {
        config.policy: simulate(trace, costs, config, held, start).seconds
        for (config, start), held in zip(runs, limits, strict=True)
    }


def _verdict(made: Plan) -> str:
    if made.gain is None:
        return f"do not bother: {made.crossing.above.upper()} is faster at any count up to the batch; run it alone"
    better = Layout.EP if made.step_s["ep"] <= made.step_s["tp"] else Layout.TP
    if made.gain < LEAST_GAIN:
        return f"do not bother: {made.gain:.3f} times as fast as {better.upper()} alone"
    return f"switch: {made.gain:.2f} times as fast as {better.upper()} alone, the better static layout"
