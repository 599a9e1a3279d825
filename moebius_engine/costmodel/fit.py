"""The free parameters of a cost model, from what was measured, and how far off the fitted model still is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from moebius_engine.costmodel.costs import CostModel
from moebius_engine.layout import Layout

FREE: dict[str, tuple[float, float, float]] = {
    "layer_floor_s": (0.0, 1e-3, 50e-6),
    "dispatch_floor_s": (0.0, 1e-3, 100e-6),
    "row_passes": (1.0, 4.0, 1.5),
}
"""Fields of Achieved: least, most, and where the search begins.

row_passes goes up to 4: a kernel that reads its rows again for each tile of columns, and a few passes that sort, pad
and weight them. More is not the traffic of rows any more, and extrapolates badly (docs/costmodel.md).
"""


@dataclass(frozen=True)
class Observation:
    """name: of what was measured. measured: above 0, in any unit. predict: the same from a cost model."""

    name: str
    measured: float
    predict: Callable[[CostModel], float]


@dataclass(frozen=True)
class Residual:
    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10 % too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Fit:
    costs: CostModel
    residuals: tuple[Residual, ...]

    @property
    def worst(self) -> float:
        """The largest relative error, without its sign."""
        return max(abs(residual.error) for residual in self.residuals)


def step_observation(layout: Layout, requests: float, context: float, seconds: float) -> Observation:
    """One measured decode step."""
    name = f"{layout.upper()}, {requests:g} requests, {context:g} KV tokens [s]"
    return Observation(name, seconds, lambda costs: costs.step_s(layout, requests, context))


def fit(start: CostModel, observations: Sequence[Observation], free: Sequence[str] = tuple(FREE)) -> Fit:
    """Least squares of the logarithms of predicted over measured, so that errors are relative, within FREE's bounds.

    start: its free parameters are replaced. Raises ValueError for fewer observations than free parameters, one that is
    not above 0, or a parameter that none of them depends on.
    """
    if unknown := [name for name in free if name not in FREE]:
        raise ValueError(f"free={unknown} are unknown: use some of {list(FREE)}")
    if len(observations) < len(free):
        raise ValueError(f"{len(observations)} observations cannot give {len(free)} parameters: {list(free)}")
    for observation in observations:
        if not observation.measured > 0:
            raise ValueError(f"{observation.name}: measured={observation.measured:g} must be above 0")
    low, high, begin = (np.array(values) for values in zip(*(FREE[name] for name in free), strict=True))

    def model(scaled: np.ndarray) -> CostModel:
        values = dict(zip(free, (scaled * high).tolist(), strict=True))
        return replace(start, achieved=replace(start.achieved, **values))

    def errors(scaled: np.ndarray) -> list[float]:
        costs = model(scaled)
        return [float(np.log(o.predict(costs) / o.measured)) for o in observations]

    found = least_squares(errors, begin / high, bounds=(low / high, np.ones(len(free))))
    for name, column in zip(free, found.jac.T, strict=True):
        if not column.any():
            raise ValueError(f"{name} cannot be fitted: none of the {len(observations)} observations depends on it")
    costs = model(found.x)
    return Fit(costs, tuple(Residual(o.name, o.measured, o.predict(costs)) for o in observations))
