"""Decoding on GPUs: our engine pinned to a layout against stock SGLang in that layout.

    python scripts/bench_decode.py --ranks 2 --batch 32 --batch 256 --share-gpu \\
        --layers 8 --out benchmarks/decode_h200.json

Both engines of a layout have the same random weights and prompts, so that tokens choose the same experts. They are up
together and take turns, a batch each, so that what drifts meets both; the ratio is the median of the pairs'. Only steps
in which all requests decode are timed. A GPU must hold the model twice. Writes the JSON file after each row.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from gpu_engine import MODEL, server_args, setting, write_model, write_weights

from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine

PROMPT = 65  # tokens
RIVALS: dict[str, Callable[[str], dict[str, Any]]] = {
    "stock": lambda layout: {"policy": "off", "static_layout": layout},
    "ours": lambda layout: {"policy": layout},
}


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    model: Annotated[str, typer.Option(help="a published model's name, for its sizes")] = MODEL,
    layers: Annotated[int | None, typer.Option(min=1, help="the model's if left out")] = None,
    batch: Annotated[list[int], typer.Option(help="requests decoded together; may be given several times")] = [32],  # noqa: B006
    layout: Annotated[list[str], typer.Option(help="ep or tp; may be given twice")] = ["ep", "tp"],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=2, help="tokens a response")] = 256,
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="all ranks on GPU 0")] = False,
    changes: Annotated[list[str], typer.Option("--set", help="argument=value of SGLang's server")] = [],  # noqa: B006
) -> None:
    most = max(batch)
    held = setting(ranks, model, layers, share_gpu, changes, "random", **{"tokens a response": tokens})
    changes = ["load_format=auto", *changes]
    arguments = server_args(batch, ranks, tokens=most * (PROMPT + tokens + 1), share_gpu=share_gpu, changes=changes)
    report: dict[str, Any] = {"setting": held, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        write_weights(write_model(folder, model, layers))
        for name in layout:
            engines: dict[str, SwitchingEngine] = {}
            try:
                for whose, policy in RIVALS.items():
                    switch = SwitchConfig(share_gpu=share_gpu, timeout_s=60, **policy(name))
                    engines[whose] = SwitchingEngine(folder, ranks=ranks, switch=switch, **arguments)
                for count in batch:
                    report["rows"].append({"layout": name, "batch": count, **_compare(engines, count, tokens, repeats)})
                    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                    typer.echo(f"{name} {count}: ratio {report['rows'][-1]['ratio']:.3f}")
            finally:
                for engine in engines.values():
                    engine.shutdown()


def _compare(engines: dict[str, SwitchingEngine], requests: int, tokens: int, repeats: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {whose: [] for whose in engines}
    for turn in range(1 + repeats):  # in the first, kernels compile
        for whose in list(engines)[:: 1 if turn % 2 == 0 else -1]:
            speeds[whose].append(_tokens_per_s(engines[whose], requests, tokens))
    ratios = [ours / stock for ours, stock in zip(speeds["ours"][1:], speeds["stock"][1:], strict=True)]
    found = {f"{whose}_tokens_per_s": [round(speed, 1) for speed in times[1:]] for whose, times in speeds.items()}
    return {**found, "ratio": statistics.median(ratios)}


def _tokens_per_s(engine: SwitchingEngine, requests: int, tokens: int) -> float:
    """Of one batch, from the first token of the request that is prefilled last to its end: only decode steps of all."""
    draw = random.Random(0)
    chunks = engine.generate(
        input_ids=[[draw.randrange(10, engine.shape.vocab_size) for _ in range(PROMPT)] for _ in range(requests)],
        sampling_params={
            "temperature": 0,
            "ignore_eos": True,
            "max_new_tokens": tokens,
            "stream_interval": tokens,  # the first token and the end, so that reporting costs nothing in between
        },
        stream=True,
    )
    began: dict[int, float] = {}
    for chunk in chunks:
        ended = time.perf_counter()
        began.setdefault(chunk["index"], ended)
    return requests * (tokens - 1) / (ended - max(began.values()))


if __name__ == "__main__":
    typer.run(main)
