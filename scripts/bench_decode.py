"""Decoding on GPUs: our engine pinned to a layout against stock SGLang in that layout, one engine after the other.

python scripts/bench_decode.py --ranks 2 --batch 32 --batch 256 --share-gpu \
    --layers 8 --out benchmarks/decode_h200.json
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from gpu_engine import MODEL, server_args, setting, write_model

from moebius_engine.config import SwitchConfig
from moebius_engine.engine import SwitchingEngine

PROMPT = 65  # tokens


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
) -> None:
    most = max(batch)
    arguments = server_args(batch, ranks, tokens=most * (PROMPT + tokens + 1), share_gpu=share_gpu)
    speeds: dict[tuple[str, str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, model, layers)
        for name in layout:
            for whose, policy in (
                ("stock", {"policy": "off", "static_layout": name}),
                ("ours", {"policy": name}),
            ):
                switch = SwitchConfig(share_gpu=share_gpu, timeout_s=60, **policy)
                engine = SwitchingEngine(folder, ranks=ranks, switch=switch, **arguments)
                try:
                    for count in batch:
                        speeds[whose, name, count] = [_tokens_per_s(engine, count, tokens) for _ in range(repeats + 1)]
                        speeds[whose, name, count].pop(0)  # kernels compile
                        typer.echo(f"{whose} {name} {count}: {statistics.median(speeds[whose, name, count]):.0f}")
                finally:
                    engine.shutdown()
    rows = [
        {
            "layout": name,
            "batch": count,
            "ours_tokens_per_s": speeds["ours", name, count],
            "stock_tokens_per_s": stock,
            "ratio": statistics.median(speeds["ours", name, count]) / statistics.median(stock),
        }
        for (whose, name, count), stock in speeds.items()
        if whose == "stock"
    ]
    held = setting(ranks, model, layers, share_gpu, **{"tokens a response": tokens})
    out.write_text(json.dumps({"setting": held, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        typer.echo(f"{row['layout']} {row['batch']}: ratio {row['ratio']:.3f}")


def _tokens_per_s(engine: SwitchingEngine, requests: int, tokens: int) -> float:
    """Of one batch, its prefill included, which is the same for both."""
    began = time.perf_counter()
    engine.generate(
        input_ids=[[1 + row, *range(20, 19 + PROMPT)] for row in range(requests)],
        sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
    )
    return requests * tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    typer.run(main)
