"""Settings of a switching engine."""

from dataclasses import dataclass
from types import NoneType
from typing import Literal, get_args

from moebius_engine.layout import Layout
from moebius_engine.vitals import BEAT_S

PolicyName = Literal["rollout", "interactive", "ep", "tp", "off"]
TransferName = Literal["auto", "direct", "collective"]
CalibrateName = Literal["off", "auto", "file"]

PAPER_THRESHOLD = 256  # requests: Qwen3-235B on 8 H200 with DeepEP

# Fields, their types, and what to give. True is no number: type() and not isinstance.
_TYPES = (
    (("threshold", "low_threshold", "window"), (int, NoneType), "a whole number"),
    (("cooldown_s",), (int, float, NoneType), "a number of seconds"),
    (("timeout_s", "silent_s", "stuck_s"), (int, float), "a number of seconds"),
    (("payoff", "share_gpu", "seeded", "check_bytes", "inject_faults"), (bool,), "True or False"),
)


@dataclass(frozen=True)
class SwitchConfig:
    """When and how to switch. Raises ValueError for settings that contradict each other.

    policy: "rollout" (EP for the burst of a step, TP for its tail), "interactive" (a band with a window and a
        cooldown), "ep" or "tp" (both layouts resident, that one kept until engine.switch is called), or "off" (a
        stock SGLang engine; no second layout is built).
    static_layout: with "off", the layout that the stock engine runs.
    threshold: Tℎ, requests in flight above which EP is faster. Without one it is the calibration's, and without that
        the paper's 256, for Qwen3-235B on 8×H200 with DeepEP.
    calibrate: where a threshold that is not given comes from. "auto": measured at start (20 s or less on a GPU once
        kernels are compiled) and kept in a file for the next; "file": from that file, which must be there; "off": the
        paper's. Where one layout is faster at all numbers measured, the engine stays in it.
    low_threshold: Tℓ, below which TP is faster. rollout: always Tℎ; interactive: 0.8 Tℎ unless given.
    window: W, the counts whose mean is compared with Tℓ. rollout 1, interactive 8 unless given.
    cooldown_s: C, seconds after a switch without another. rollout 0, interactive 5 unless given.
    payoff: before a switch of the rollout policy, estimate from measured times and response lengths what the rest of
        the step gains by it, and leave it if that is less than it costs. Needs a calibration.
    transfer: how bytes move between ranks: "direct" (peers write into each other's memory), "collective" (all-to-all),
        "auto" (direct where a probe at start shows that it works).
    share_gpu: all ranks on GPU 0, to try the mechanism there: needs MPS and an NCCL that allows it (2.32 or later).
    timeout_s: deadline in seconds of every wait across ranks.
    silent_s: seconds without a sign of life after which a rank counts as stopped, and the engine as dead.
    stuck_s: the same for a rank that lives, has requests in flight and takes no forward step. A switch, an update and a
        pause do not count; the longest forward step does.
    seeded: each request draws by its own sampling_seed (without one, by its id): the same seed gives the same tokens in
        any layout and batch, but for rounding. Needs SGLang's sampling_backend="pytorch" on a GPU.
    check_bytes: compare all moved KV byte for byte at every switch, and of every layer what was sent with what arrived.
        Slow: for verification. Without it one of 1,999 layer moves is compared.
    inject_faults: take engine.inject(Fault(...)), which breaks a switch on purpose: for tests and soaks.

    Source of the defaults: arXiv 2606.26607, section 5.
    """

    policy: PolicyName = "rollout"
    static_layout: Layout = Layout.EP
    threshold: int | None = None
    calibrate: CalibrateName = "off"
    low_threshold: int | None = None
    window: int | None = None
    cooldown_s: float | None = None
    payoff: bool = False
    transfer: TransferName = "auto"
    share_gpu: bool = False
    timeout_s: float = 300.0
    silent_s: float = 8.0
    stuck_s: float = 120.0
    seeded: bool = False
    check_bytes: bool = False
    inject_faults: bool = False

    def __post_init__(self) -> None:
        for name, known in (("policy", PolicyName), ("transfer", TransferName), ("calibrate", CalibrateName)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {list(get_args(known))}")
        if self.static_layout not in set(Layout):
            raise ValueError(f"static_layout={self.static_layout!r} is unknown: use one of {[str(x) for x in Layout]}")
        if self.policy != "off" and self.static_layout != Layout.EP:
            raise ValueError(
                f"static_layout={str(self.static_layout)!r} with policy={self.policy!r}: only policy='off' has one; "
                "policy='tp' keeps TP with both layouts resident"
            )
        for names, types, what in _TYPES:
            for name in names:
                if type(getattr(self, name)) not in types:
                    raise ValueError(f"{name}={getattr(self, name)!r}: {what}")
        if self.threshold is not None and self.threshold < 1:
            raise ValueError(f"threshold={self.threshold}: at least 1 request")
        if self.low_threshold is not None:
            if self.policy == "rollout" and self.low_threshold != self.high:
                raise ValueError(
                    f"low_threshold={self.low_threshold} with threshold={self.high}: the rollout policy has one "
                    "threshold; leave low_threshold out or use policy='interactive'"
                )
            if not 1 <= self.low_threshold <= self.high:
                raise ValueError(f"low_threshold={self.low_threshold} must lie between 1 and threshold={self.high}")
            if self.threshold is None and self.calibrate != "off":
                raise ValueError(
                    f"low_threshold={self.low_threshold} without threshold, which calibrate={self.calibrate!r} is to "
                    "find: give both, or neither"
                )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: at least 1 count")
        if self.cooldown_s is not None and not 0 <= self.cooldown_s < float("inf"):
            raise ValueError(f"cooldown_s={self.cooldown_s}: 0 seconds or more")
        if self.payoff and (self.policy != "rollout" or self.calibrate == "off"):
            raise ValueError(
                f"payoff=True with policy={self.policy!r} and calibrate={self.calibrate!r}: it belongs to the rollout "
                "policy and needs measured times, calibrate='auto' or 'file'"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s={self.timeout_s}: more than 0 seconds")
        for name in ("silent_s", "stuck_s"):
            if not 4 * BEAT_S <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name}={getattr(self, name)}: {4 * BEAT_S:g} seconds or more; a rank gives a sign of life every "
                    f"{BEAT_S:g} s"
                )

    @property
    def high(self) -> int:
        """Tℎ that holds."""
        return PAPER_THRESHOLD if self.threshold is None else self.threshold

    @property
    def low(self) -> int:
        """Tℓ that holds."""
        if self.low_threshold is not None:
            return self.low_threshold
        return max(1, self.high * 8 // 10) if self.policy == "interactive" else self.high

    @property
    def counts(self) -> int:
        """W that holds."""
        return self.window or (8 if self.policy == "interactive" else 1)

    @property
    def rest_s(self) -> float:
        """C that holds, in seconds."""
        if self.cooldown_s is not None:
            return self.cooldown_s
        return 5.0 if self.policy == "interactive" else 0.0
