"""Transfer benchmark on GPUs: direct peer writes against staged NCCL and against the device's own copy.

    python scripts/bench_transfer.py --out benchmarks/transfer_h200.json

Every figure is GB/s of bytes read plus bytes written, summed over the ranks: the median of the switches, each as long
as its slowest rank, fences and all layers included. With fewer GPUs than ranks, ranks share a GPU and NVLink is not
crossed; they then need MPS, and an NCCL that allows it (2.32 with NCCL_MULTI_RANK_GPU_ENABLE=1). With a GPU for each,
link_gbs is what the busiest rank writes to its peers, and peer_sm_gbs, peer_copy_engine_gbs what a GPU can.
"""

import ctypes
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import torch.multiprocessing as mp
import typer
from bench_transfer_peer import copy_gbs, peer_gbs
from bench_transfer_rank import Sizes, run_rank

# Where ranks share a GPU, all their kernels must fit on it at once, or the first collective hangs.
SHARED_GPU = {
    2: {},
    4: {"NCCL_MAX_NCHANNELS": "4", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"},
    8: {"NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12"},
}


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")] = Path("benchmarks/transfer_h200.json"),
    ranks: Annotated[list[int] | None, typer.Option(help="P; 2, 4 and 8 unless given")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="timed switches a direction")] = 20,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    experts: Annotated[int, typer.Option(min=8)] = 128,
    tokens: Annotated[int, typer.Option(min=8, help="live tokens over all ranks")] = 65536,
    nccl: Annotated[bool, typer.Option(help="also the staged transfer")] = True,
) -> None:
    sizes = Sizes(layers, experts, tokens, repeats, nccl)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_device_rank, args=(folder, repeats), nprocs=1)
        device = json.loads(Path(folder, "copy.json").read_text(encoding="utf-8"))
        rows = []
        for count in ranks or [2, 4, 8]:
            with _environment(SHARED_GPU.get(count, {}) if device["gpus"] < count else {}):
                mp.spawn(run_rank, args=(count, str(Path(folder, f"store{count}")), sizes, folder), nprocs=count)
            results = [json.loads(Path(folder, f"{count}-{r}.json").read_text(encoding="utf-8")) for r in range(count)]
            rows += _rows(count, results, device)
            for row in rows[-4:]:
                typer.echo(json.dumps(row))
    report = {"rows": rows, "setting": _setting(sizes, device)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(_table(rows))
    typer.echo(json.dumps(report["setting"], indent=2))


def _device_rank(_: int, folder: str, repeats: int) -> None:
    """What one process without limits sees."""
    result = {
        "copy_gbs": copy_gbs(repeats),
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(),
        "nccl": _nccl_version(),
    }
    if result["gpus"] > 1:
        result["peer_gbs"] = peer_gbs(repeats)
    Path(folder, "copy.json").write_text(json.dumps(result), encoding="utf-8")


def _nccl_version() -> str:
    """Of the library that is loaded, which LD_PRELOAD may have changed; torch names the one that it was built with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rows(ranks: int, results: list[dict], device: dict) -> list[dict]:
    rows = []
    for what in ("weights", "kv"):
        for target in ("tp", "ep"):
            row = {"ranks": ranks, "what": what, "direction": "ep_to_tp" if target == "tp" else "tp_to_ep"}
            for rival in ("direct", "nccl"):
                each = [result["times_ms"].get(f"{rival} {what}", {}).get(target) for result in results]
                if all(each):
                    ms = statistics.median(max(times) for times in zip(*each, strict=True))
                    row[f"{rival}_gbs"] = round(results[0]["bytes"][what][target] / ms / 1e6, 1)
                    row[f"{rival}_ms"] = round(ms, 3)
            row["copy_gbs"] = device["copy_gbs"]
            if device["gpus"] >= ranks and "direct_ms" in row:
                row["link_bytes"] = max(result["link_bytes"][what][target] for result in results)
                row["link_gbs"] = round(row["link_bytes"] / row["direct_ms"] / 1e6, 1)
                row |= {f"peer_{way}_gbs": gbs for way, gbs in device["peer_gbs"].items()}
            row["bytes"] = results[0]["bytes"][what][target]
            if what == "kv":
                row["plan_ms"] = round(max(result["kv_plan_ms"] for result in results), 2)
            rows.append(row)
    return rows


def _table(rows: list[dict]) -> str:
    lines = ["P  what     direction  direct    nccl    copy  direct/copy  direct/nccl"]
    for row in rows:
        direct, nccl, copy = row["direct_gbs"], row.get("nccl_gbs"), row["copy_gbs"]
        faster = f"{direct / nccl:12.1f}" if nccl else f"{'-':>12}"
        lines.append(
            f"{row['ranks']}  {row['what']:<8} {row['direction']}  {direct:7.0f} {nccl or 0:7.0f} {copy:7.0f} "
            f"{direct / copy:12.3f} {faster}"
        )
        if "link_gbs" in row:
            lines.append(
                f"   {row['link_gbs']:.0f} GB/s to peers, {row['link_gbs'] / row['peer_sm_gbs']:.3f} of a kernel's; "
                f"{row['direct_ms']:.1f} ms, staged {row.get('nccl_ms', 0):.1f} ms"
            )
    return "\n".join(lines)


def _setting(sizes: Sizes, device: dict) -> dict:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "gpu": device["gpu"],
        "gpus": device["gpus"],
        "ranks share one GPU": device["gpus"] == 1,
        "driver": driver,
        "versions": {
            **{name: version(name) for name in ("torch", "cuda-bindings")},
            "cuda": torch.version.cuda,
            "nccl": device["nccl"],
        },
        "date": date.today().isoformat(),
        "model": f"{sizes.layers} layers, {sizes.experts} experts, H 2048, I 768, 4 KV heads, D 128, bf16",
        "live_tokens": sizes.tokens,
        "page_size": 1,
        "repeats": sizes.repeats,
        "unit": "GB/s, bytes read plus written, summed over ranks; median of the switches, slowest rank of each",
    }


if __name__ == "__main__":
    typer.run(main)
