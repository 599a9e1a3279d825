"""A calibration as a file, found again by what it was measured on."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, NonNegativeInt, ValidationError

from moebius_engine.calibration.context import Longer
from moebius_engine.calibration.curve import Crossing, Point
from moebius_engine.telemetry import Record, SwitchRecord


class Setting(Record):
    """What a calibration holds for: with any of it different, another is measured."""

    model: Mapping[str, int | str] = Field(description="sizes of the model (layout.shape.ModelShape)")
    dtype: str = Field(description="of weights and KV")
    ranks: int = Field(description="P")
    device: str = Field(description="name of the GPU, or of the CPU and its cores")
    share_gpu: bool = Field(description="whether all ranks run on one GPU")
    context: int = Field(description="tokens that each request held [tokens]")
    kernels: Mapping[str, str] = Field(default_factory=dict, description="server arguments that choose them")
    versions: Mapping[str, str] = Field(description="of what decides the speed")

    @property
    def name(self) -> str:
        """Of the file."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16] + ".json"


class Calibration(Record):
    setting: Setting
    points: tuple[Point, ...] = Field(description="at setting.context tokens a request")
    fits: NonNegativeInt | None = Field(
        default=None, description="of which so many fit; more than measured if there was no time for them [requests]"
    )
    longer: Longer | None = Field(default=None, description="a few at more, None if there was no room or time for it")
    crossing: Crossing = Field(description="of points")
    switches: tuple[SwitchRecord, ...] = Field(description="those made while measuring, with requests in flight")
    warm_up_s: float = Field(default=0.0, description="batches and single prefills first, in which kernels compile [s]")
    seconds: float = Field(description="what measuring took after that [s]")

    @property
    def cut_at(self) -> int | None:
        """The largest number measured if more would have fitted, else None."""
        most = max(p.requests for p in self.points)
        return most if self.fits is not None and most < self.fits else None

    @property
    def by_context(self) -> list[tuple[int, tuple[Point, ...]]]:
        """Tokens a request, and the points measured there: the asked context first."""
        longer = [] if self.longer is None else [(self.longer.context, self.longer.points)]
        return [(self.setting.context, self.points), *longer]


def folder() -> Path:
    """Where calibrations are kept, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moebius-rollout" / "calibration"


def path_of(setting: Setting, where: Path | None = None) -> Path:
    """Where the calibration of this setting is, or would be. where: the folder, folder() by default."""
    return (where or folder()) / setting.name


def load(setting: Setting, where: Path | None = None) -> Calibration | None:
    """The calibration of this setting, None if there is none. Raises as read."""
    path = path_of(setting, where)
    if not path.exists():
        return None
    try:
        return read(path)
    except ValueError as error:
        raise ValueError(f"{error}; remove it") from error


def read(path: Path) -> Calibration:
    """A calibration's file. Raises ValueError, naming it, for what is none."""
    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{path} is no calibration: {error.errors()[0]['msg']}") from error


def save(calibration: Calibration, where: Path | None = None) -> Path:
    """Write it under its setting's name. Returns the path."""
    path = path_of(calibration.setting, where)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")  # engines may start at the same time
    partial.write_text(calibration.model_dump_json(indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path
