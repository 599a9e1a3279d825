"""Calibration at an engine's start: from a file or by measuring, and what the policy makes of it."""

import logging
import math
import os
import platform
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moebius_engine.calibration import store
from moebius_engine.calibration.context import at_longer
from moebius_engine.calibration.curve import Crossing, crossing
from moebius_engine.calibration.measure import measure
from moebius_engine.calibration.store import Calibration, Setting
from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout

log = logging.getLogger(__name__)

CONTEXT, BUDGET_S = 1024, 20.0
_KERNELS = ("attention_backend", "moe_a2a_backend", "moe_runner_backend", "disable_cuda_graph")
_VERSIONS = ("moebius-rollout", "sglang", "torch")


def setting_of(engine: Any, context: int = CONTEXT) -> Setting:
    """engine: a SwitchingEngine."""
    cuda = torch.cuda.is_available()
    return Setting(
        model=asdict(engine.shape),
        dtype=str(engine.tokenizer_manager.model_config.dtype).removeprefix("torch."),
        ranks=engine.ranks,
        device=torch.cuda.get_device_name(0) if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        share_gpu=engine.config.share_gpu,
        context=context,
        kernels={name: str(getattr(engine.server_args, name)) for name in _KERNELS},
        versions={name: version(name) for name in _VERSIONS},
    )


async def calibrate(engine: Any, context: int = CONTEXT, budget_s: float = BUDGET_S) -> Calibration:
    """Measure. engine: idle; no policy switches it meanwhile, and afterwards its own holds again, with what it reckoned
    with. Raises as measure.measure."""
    config, known = engine.config, engine.calibration
    await engine.async_set_policy(replace(config, policy="ep", low_threshold=None, payoff=False))
    try:
        found = await measure(engine, context, budget_s)
    finally:
        await _set_policy(engine, config, known)
    return Calibration(
        setting=setting_of(engine, context),
        points=tuple(found.points),
        fits=found.fits,
        longer=found.longer,
        crossing=crossing(found.points),
        switches=tuple(found.switches),
        warm_up_s=found.warm_up_s,
        seconds=found.seconds,
    )


async def calibrate_at_start(engine: Any, where: Path | None = None) -> None:
    """Give the engine's policy the crossing that holds here, as SwitchConfig.calibrate says.

    where: the folder of calibrations, store.folder() by default. Raises ValueError if there is none and "file" is
    asked for.
    """
    config = engine.config
    decided = config.threshold is not None and not config.payoff
    if config.calibrate == "off" or decided or config.policy not in ("rollout", "interactive"):
        return
    setting = setting_of(engine)
    found = store.load(setting, where)
    origin = str(store.path_of(setting, where))
    if found is None and config.calibrate == "file":
        given = [f"--set {name}={value}" for name, value in setting.kernels.items() if value != "None"]
        options = " ".join([*["--share-gpu"] * setting.share_gpu, *given])
        raise ValueError(
            f"calibrate='file': {origin} does not exist; run `moebius-rollout calibrate --model "
            f"{engine.server_args.model_path} --ranks {setting.ranks} {options}`, or use calibrate='auto'"
        )
    if found is None:
        found = await calibrate(engine)
        took = f"{found.seconds:.1f} s after {found.warm_up_s:.1f} s in which kernels compiled"
        origin = f"measured in {took}, kept in {store.save(found, where)}"
    await _set_policy(engine, calibrated(config, found), found)
    log.warning("%s (%s)", in_words(found), origin)


async def _set_policy(engine: Any, config: SwitchConfig, known: Calibration | None) -> None:
    """Also go to the layout that it stays in, if any: measuring leaves the engine in EP."""
    await engine.async_set_policy(config, known)
    if config.policy in set(Layout):
        await engine.async_switch(config.policy)


def calibrated(config: SwitchConfig, found: Calibration) -> SwitchConfig:
    """The same with the crossing as its threshold, or pinned to the layout that is faster everywhere. A threshold that
    the user gave stays. Above the numbers that there was time for, EP is taken to be faster."""
    if config.threshold is not None:
        return config
    decides = _decides(found)
    if decides.requests is None:
        assert decides.winner is not None
        if (cut_at := _tp_up_to(found, decides)) is not None:
            return replace(config, threshold=cut_at + 1)
        return replace(config, policy=decides.winner, low_threshold=None, payoff=False)
    return replace(config, threshold=max(1, math.ceil(decides.requests)))


def in_words(found: Calibration) -> str:
    """One line: the crossing and its interval, or who wins, and what longer contexts make of it."""
    measured = sorted({p.requests for p in found.points})
    where, cross = f"measured from {measured[0]} to {measured[-1]} requests", found.crossing
    if cross.requests is None:
        name = str(cross.winner).upper()
        if _decides(found) != cross:
            stays = ""
        elif _tp_up_to(found, cross) is not None:
            stays = ", and EP is taken to be above them, where there was no time to measure"
        else:
            stays = f", so the engine stays in {name}"
        return f"calibration: {name} is faster at all numbers {where}{stays}{_longer_in_words(found)}"
    least = f"below {measured[0]}" if cross.least is None else f"{cross.least:.0f}"
    most = f"above {measured[-1]}" if cross.most is None else f"{cross.most:.0f}"
    faster = f"calibration: EP is faster from {cross.requests:.0f} requests on (95 %: {least} to {most}), {where}"
    return faster + _longer_in_words(found)


def _decides(found: Calibration) -> Crossing:
    """The crossing, or if there is none but one with longer contexts, that one."""
    longer = _at_longer(found)
    return longer if found.crossing.requests is None and longer and longer.requests else found.crossing


def _tp_up_to(found: Calibration, decides: Crossing) -> int | None:
    """The largest number measured if TP wins up to there, and there was no time for those above."""
    return found.cut_at if decides.winner == "tp" else None


def _at_longer(found: Calibration) -> Crossing | None:
    if found.longer is None:
        return None
    return crossing(at_longer(found.points, found.setting.context, found.longer))


def _longer_in_words(found: Calibration) -> str:
    there = _at_longer(found)
    if found.longer is None or there is None:
        return ""
    faster = f"{str(there.winner).upper()} at all" if there.requests is None else f"EP from {there.requests:.0f} on"
    return f"; with {found.longer.context:,} tokens a request instead of {found.setting.context:,}, {faster}"
