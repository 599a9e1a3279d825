"""What GPUs and links do at best, and the share of it that decoding reaches. SI units: bytes, seconds, FLOP.

Data sheets are NVIDIA's, for the SXM modules. Bandwidths of links are those of one GPU in one direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moebius_engine.memory.budget import GB

LinkName = Literal["nvlink", "infiniband-hdr", "infiniband-ndr", "infiniband-xdr", "shared"]


@dataclass(frozen=True)
class Link:
    """How ranks are joined.

    bytes_per_s: at best. latency_s: of a collective of a few bytes. collective: share of bytes_per_s that collectives
    of megabytes reach. direct: share that a kernel reaches which writes into peers' memory, as a switch does.
    """

    bytes_per_s: float
    latency_s: float
    collective: float
    direct: float


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. hbm: bytes/s. flops: dense bf16, FLOP/s. domain: GPUs that NVLink can join."""

    name: str
    memory: int
    hbm: float
    flops: float
    nvlink: Link
    domain: int = 8  # HGX boards


def _nvlink(bytes_per_s: float) -> Link:
    """latency_s, collective: NCCL's all-reduce on 8 H100 takes 19 µs for 128 bytes and 136 µs for 16 MiB, which is
    2 · 7/8 · 16 MiB / (136 - 19 µs) = 252 GB/s of 450 (ByteDance-Seed/Triton-distributed, issue 57).
    direct: our kernel writes 357 to 363 GB/s of 450 from one H200 to another (benchmarks/transfer_2xh200.json).
    Both were measured on NVLink 4 and are taken for the other generations.
    """
    return Link(bytes_per_s, latency_s=19e-6, collective=0.56, direct=0.80)


def _nic(bytes_per_s: float) -> Link:
    """latency_s: NCCL's all-reduce of 8 bytes between two hosts (NVIDIA/nccl-tests, issue 150). Shares: 46 GB/s of an
    NDR NIC's 50 (NVIDIA/nccl-tests, issue 290)."""
    return Link(bytes_per_s, latency_s=19e-6, collective=0.92, direct=0.92)


# Memory as nvidia-smi counts it (81,920, 81,559, 143,771 and 183,359 MiB), rounded down to GB of 10^9 bytes.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # "A100 80GB SXM" data sheet: 2,039 GB/s, 312 TFLOPS, NVLink 3 with 600 GB/s both ways.
        Gpu("A100", 85 * GB, 2039 * GB, 312e12, _nvlink(300 * GB)),
        # "H100 SXM" data sheet: 3.35 TB/s, 1,979 TFLOPS with sparsity, NVLink 4 with 900 GB/s both ways.
        Gpu("H100", 85 * GB, 3350 * GB, 989e12, _nvlink(450 * GB)),
        # "H200 SXM" data sheet: 4.8 TB/s, otherwise as H100.
        Gpu("H200", 150 * GB, 4800 * GB, 989e12, _nvlink(450 * GB)),
        # "DGX B200" data sheet, an eighth of it: 64 TB/s and 72 PFLOPS FP8 with sparsity, so 2.25 PFLOPS bf16 without;
        # NVLink 5 with 1.8 TB/s both ways. NVL72 racks join 72.
        Gpu("B200", 192 * GB, 8000 * GB, 2250e12, _nvlink(900 * GB), domain=72),
    )
}

# InfiniBand, one NIC for each GPU: HDR 200, NDR 400 and XDR 800 Gb/s (data sheets of ConnectX-6, -7 and -8).
NICS: Mapping[str, Link] = {
    "infiniband-hdr": _nic(25 * GB),
    "infiniband-ndr": _nic(50 * GB),
    "infiniband-xdr": _nic(100 * GB),
}
LINKS: tuple[str, ...] = ("nvlink", *NICS, "shared")


@dataclass(frozen=True)
class Achieved:
    """Shares of the peaks that decoding reaches, and what no peak explains.

    The last three are free: `costmodel.fit` finds them from measured points.

    hbm: a device copy on an H200 moves 4,208 of 4,800 GB/s (benchmarks/transfer_h200.json). flops: an assumption; it
    hardly counts in decoding. layer_floor_s: per layer, what kernels take beyond bytes and FLOP. dispatch_floor_s: per
    layer in EP, what dispatch and combine take beyond the link's latency. row_passes: how many times over the rows of
    routed tokens cross HBM (costmodel.decode).
    """

    layer_floor_s: float
    dispatch_floor_s: float
    row_passes: float
    hbm: float = 0.877
    flops: float = 0.7

    def __post_init__(self) -> None:
        for name in ("hbm", "flops"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name):g} must be a share above 0 and at most 1")
        for name, least in (("layer_floor_s", 0), ("dispatch_floor_s", 0), ("row_passes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name):g} must be at least {least}")


@dataclass(frozen=True)
class Cluster:
    """P = ranks on hosts of ranks / hosts GPUs each; NVLink inside a host, a NIC for each GPU between hosts."""

    gpu: Gpu
    ranks: int
    hosts: int = 1
    nic: Link | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        if self.hosts < 1 or self.ranks % self.hosts:
            raise ValueError(f"hosts={self.hosts} must divide ranks={self.ranks}")
        if (self.nic is None) != (self.hosts == 1):
            raise ValueError(f"hosts={self.hosts}: several hosts need a NIC, and one host has none")

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts

    @classmethod
    def of(cls, gpu: str, ranks: int, link: str = "nvlink") -> "Cluster":
        """By names. InfiniBand: two hosts of P / 2 GPUs. "shared": P ranks on one GPU, each with 1/P of its rates; what
        they exchange crosses its memory twice, once read and once written. Raises ValueError for an unknown name."""
        for name, value, known in (("gpu", gpu, GPUS), ("link", link, LINKS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown: use one of {list(known)}")
        model = GPUS[gpu]
        if link == "shared":
            own = model.hbm / ranks if ranks > 0 else model.hbm
            memory = replace(model.nvlink, bytes_per_s=own / 2, collective=0.877, direct=0.877)  # as Achieved.hbm
            return cls(
                replace(model, memory=model.memory // max(1, ranks), hbm=own, flops=model.flops / max(1, ranks),
                        nvlink=memory, domain=ranks),
                ranks,
            )  # fmt: skip
        return cls(model, ranks) if link == "nvlink" else cls(model, ranks, hosts=2, nic=NICS[link])
