"""Serving benchmark: the paper's bursty trace over HTTP, against static TP, static EP and switching, in one run.

    python scripts/bench_serving.py --model Qwen3-235B-A22B --ranks 8
    python scripts/bench_serving.py --rate-scale 0.5 --time-scale 0.2 --length-scale 0.05 --threshold 32

Without --model it is a small random one, made on the spot. Writes a JSON file and a PNG beside it.
"""

import asyncio
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from contestants import device, model_or_tiny
from transformers import AutoConfig

from moebius_engine.config import PAPER_THRESHOLD
from moebius_engine.telemetry import StepTrace
from rollout.serving.client import send_trace
from rollout.serving.latency import Response, in_bins, spread
from rollout.serving.plot import Served, save_png
from rollout.simulate.trace import Trace, burst_windows, bursty_trace

BIN_S, COOLDOWN_S = 10.0, 5.0  # arXiv 2606.26607, sections 6.2 and 5
POLICIES = {"tp": "tp", "ep": "ep", "switching": "interactive"}
WARM_UP = 32  # requests in each layout
STOP_S = 60.0


def main(
    out: Annotated[Path, typer.Option(help="JSON file; the PNG lies beside it.")] = Path("benchmarks/serving.json"),
    model: Annotated[str | None, typer.Option(help="As bench_rollout.py's.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="P: processes that share the model.")] = 2,
    threshold: Annotated[int, typer.Option(min=1, help="T_h of the switching server.")] = PAPER_THRESHOLD,
    rate_scale: Annotated[float, typer.Option(help="Factor of the requests per second.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Factor of the durations; of bins and cooldown too.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Factor of the prompts' and responses' tokens.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of a server's start, and of each request.")] = 900.0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="argument=value of SGLang's server.")] = None,
) -> None:
    trace = bursty_trace(seed, rate_scale, time_scale, length_scale)
    with tempfile.TemporaryDirectory() as folder:
        path, name, changes = model_or_tiny(model, folder, changes or [])
        vocab_size = AutoConfig.from_pretrained(path).vocab_size
        options = {
            "--model": path,
            "--ranks": ranks,
            "--threshold": threshold,
            "--cooldown-s": COOLDOWN_S * time_scale,
        }
        runs = {}
        for contestant, policy in POLICIES.items():
            with serving(options | {"--policy": policy}, changes or [], timeout_s) as url:
                runs[contestant] = asyncio.run(
                    run(url, contestant, trace, vocab_size, COOLDOWN_S * time_scale, timeout_s)
                )
            typer.echo(f"{contestant}: {json.dumps(summary(runs[contestant][0], time_scale)['whole run'])}")
    served = {who: Served(in_bins(seen, BIN_S * time_scale), recorded) for who, (seen, recorded) in runs.items()}
    setting = {
        "trace": "synthetic, from the published rates and ranges of arXiv 2606.26607, section 6.2",
        "scales": {"rate": rate_scale, "time": time_scale, "length": length_scale},
        "requests": len(trace.arrivals_s),
        "bin_s": BIN_S * time_scale,
        "seed": seed,
        "model": name,
        "ranks": ranks,
        "threshold": threshold,
        "server_arguments": changes,
        "device": device(),
        "versions": {package: version(package) for package in ("sglang", "torch", "transformers")},
        "python": platform.python_version(),
    }
    report = {"setting": setting, "runs": {who: _report(runs[who], served[who], time_scale) for who in runs}}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    title = f"{name}, {ranks} ranks on {setting['device']}\n{setting['requests']} requests, $T_h$ = {threshold}"
    save_png(served, burst_windows(time_scale), out.with_suffix(".png"), title)


@contextmanager
def serving(options: dict[str, Any], changes: list[str], timeout_s: float) -> Iterator[str]:
    """`moebius-rollout serve` as a process of its own, for as long as the context lasts. Gives its address."""
    from moebius_engine.sglang.ports import free_port

    port = free_port()
    command = [str(Path(sys.executable).with_name("moebius-rollout")), "serve", "--port", str(port)]
    command += [str(part) for option in options.items() for part in option]
    command += [part for change in changes for part in ("--set", change)]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + timeout_s
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not _is_healthy(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}: {' '.join(command)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server did not start within {timeout_s} s: {' '.join(command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=30).status_code == 200
    except requests.ConnectionError:
        return False


async def run(
    url: str, contestant: str, trace: Trace, vocab_size: int, cooldown_s: float, timeout_s: float
) -> tuple[list[Response], StepTrace]:
    """Warm up, then the trace. The switching server begins it in TP, as the paper's, and past its cooldown."""
    warm_up = Trace("warm-up", [0.0] * WARM_UP, trace.prompts[:1] * WARM_UP, [8] * WARM_UP, 8)
    for layout in ("ep", "tp") if contestant == "switching" else (contestant,):
        _post(url, "switch", timeout_s, layout=layout)
        await send_trace(url, warm_up, vocab_size, timeout_s, seed=1)
    if contestant == "switching":
        _post(url, "switch", timeout_s, layout="tp")  # should the policy have left it
        await asyncio.sleep(cooldown_s)
    _post(url, "trace", timeout_s)
    seen = await send_trace(url, trace, vocab_size, timeout_s)
    return seen, StepTrace(**_post(url, "trace", timeout_s))


def _post(url: str, what: str, timeout_s: float, **body: Any) -> Any:
    answer = requests.post(f"{url}/moebius/{what}", json=body, timeout=timeout_s)
    answer.raise_for_status()
    return answer.json()


def summary(seen: list[Response], time_scale: float) -> dict[str, Any]:
    """TTFT and TPOT of the requests that arrive in each burst, between them, and in the whole run."""
    (_, first_end), (second_begin, _) = burst_windows(time_scale)
    end_s = max(response.tokens_s[-1] for response in seen)
    windows = {
        "first burst": (0.0, first_end),
        "quiet": (first_end, second_begin),
        "second burst": (second_begin, end_s),
        "whole run": (0.0, end_s),
    }
    found: dict[str, Any] = {}
    for name, (begin, end) in windows.items():
        inside = [response for response in seen if begin <= response.arrival_s < end]
        found[name] = {
            "requests": len(inside),
            "ttft_s": spread(response.ttft_s for response in inside),
            "tpot_s": spread(response.tpot_s for response in inside),
        }
    return found


def _report(run: tuple[list[Response], StepTrace], served: Served, time_scale: float) -> dict[str, Any]:
    seen, recorded = run
    return {
        **summary(seen, time_scale),
        "seconds": max(response.tokens_s[-1] for response in seen),
        "tokens": sum(len(response.tokens_s) for response in seen),
        "most_in_flight": max(sample.inflight for sample in recorded.samples),
        "switches": [record.model_dump() for record in recorded.switches],
        "bins": [asdict(one) for one in served.bins],
    }


if __name__ == "__main__":
    typer.run(main)
