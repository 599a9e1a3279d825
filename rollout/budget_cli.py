"""`moebius-rollout budget`: what one rank's memory holds, without a GPU and without an engine."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebius_engine.layout.heads import holders_per_head, kv_heads_per_rank
from moebius_engine.layout.shape import ModelShape
from moebius_engine.memory.budget import (
    GB,
    ITEMSIZE,
    Budget,
    Column,
    Sizes,
    budget,
    requests_per_rank,
    tokens_that_fit,
)
from moebius_engine.memory.presets import PRESETS
from rollout.failure import fail

_COLUMNS: tuple[Column, ...] = ("both", "ep", "tp")
_WEIGHTS = ("experts", "spare expert slot", "attention", "embedding", "norms, router, head")


@dataclass(frozen=True)
class Question:
    """What the command was asked, in its own terms. gpu_memory: in GB of 10^9 bytes."""

    model: str
    ranks: int
    max_total_tokens: int | None = None
    gpu_memory: float | None = None
    mem_fraction: float | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    dtype: str | None = None
    device: str = "cuda"
    transfer: str | None = None


def budget_command(
    model: Annotated[str, typer.Option(help=f"A folder or file with config.json, or one of {', '.join(PRESETS)}.")],
    ranks: Annotated[int, typer.Option(help="P: GPUs that share the model.")],
    max_total_tokens: Annotated[int | None, typer.Option(help="KV tokens that a rank holds in EP.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="One GPU's, in GB of 10^9 bytes. An H200 has 150.")] = None,
    mem_fraction: Annotated[float | None, typer.Option(help="SGLang's mem_fraction_static.")] = None,
    max_running_requests: Annotated[int | None, typer.Option(help="Of all ranks; SGLang's rule if left out.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Tokens of a request; the model's if left out.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights and KV; the model's if left out.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    transfer: Annotated[str | None, typer.Option(help="direct (unless on a CPU) or collective.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in bytes.")] = False,
) -> None:
    """Print what one rank's memory holds, and the KV tokens of both layouts. Needs no GPU.

    Give --max-total-tokens, or --gpu-memory and --mem-fraction. With all of them, exit code 2 if they do not fit.
    """
    question = Question(
        *(model, ranks, max_total_tokens, gpu_memory, mem_fraction),
        *(max_running_requests, context_length, dtype, device, transfer),
    )
    try:
        made = answer(question)
    except ValueError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(to_json(made)))
    else:
        print_budget(made, Console())


def answer(question: Question) -> Budget:
    """The budget asked for. Raises ValueError, with both numbers, for what does not fit or cannot be."""
    config = read_config(question.model)
    dtype = question.dtype or config.get("dtype") or config.get("torch_dtype")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype={dtype!r} is unknown; use one of {list(ITEMSIZE)}")
    positions = config["max_position_embeddings"]
    sizes = Sizes(
        shape=ModelShape.from_hf_config(config),
        ranks=question.ranks,
        tokens=1,
        requests=1,
        context=positions if question.context_length is None else question.context_length,
        positions=positions,
        itemsize=ITEMSIZE[dtype],
        kv_itemsize=ITEMSIZE[dtype],
        device=question.device,
        transfer=question.transfer or ("collective" if question.device == "cpu" else "direct"),
    )
    tokens = _tokens(question, sizes)
    requests = requests_per_rank(question.max_running_requests, tokens, sizes.context, sizes.ranks)
    if requests < 1:
        asked = question.max_running_requests
        raise ValueError(
            f"max_running_requests={asked} leaves none to each of {sizes.ranks} ranks, with {tokens} tokens"
        )
    made = budget(replace(sizes, tokens=tokens, requests=requests))
    if question.gpu_memory is not None and made.total > question.gpu_memory * GB:
        raise ValueError(
            f"{made.total / GB:.1f} GB do not fit into gpu_memory={question.gpu_memory:g} GB, with {tokens} tokens and "
            f"{requests} requests a rank; lower max_total_tokens, mem_fraction, max_running_requests or context_length"
        )
    return made


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a folder, a file or a preset. Raises ValueError if there is none, or it is none."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model={model!r} is no folder or file with a config.json, and none of {list(PRESETS)}; "
            "nothing is downloaded"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        ModelShape.from_hf_config(config)
        config["max_position_embeddings"]
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no model's config.json: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}") from error
    return config


def _tokens(question: Question, sizes: Sizes) -> int:
    """KV tokens that a rank holds in EP: those asked for, or what SGLang would find room for."""
    asked, memory, fraction = question.max_total_tokens, question.gpu_memory, question.mem_fraction
    if asked is not None and asked < 1:
        raise ValueError(f"max_total_tokens={asked} must be at least 1")
    if memory is not None and memory <= 0:
        raise ValueError(f"gpu_memory={memory:g} must be above 0, in GB")
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"mem_fraction={fraction:g} must lie between 0 and 1")
    if fraction is not None and memory is None:
        raise ValueError(f"mem_fraction={fraction:g} needs gpu_memory")
    if asked is None and fraction is None:
        raise ValueError("give max_total_tokens, or gpu_memory and mem_fraction")
    if memory is None or fraction is None:
        assert asked is not None
        return asked
    fitting = tokens_that_fit(sizes, round(memory * GB), fraction)
    if fitting < 1:
        weights = sum(c.nbytes for c in budget(sizes).components if c.name in _WEIGHTS)
        raise ValueError(
            f"gpu_memory={memory:g} GB leaves no room for KV at mem_fraction={fraction:g}: "
            f"weights alone take {weights / GB:.1f} GB on each of {sizes.ranks} ranks; use more ranks"
        )
    if asked is not None and asked > fitting:
        raise ValueError(
            f"max_total_tokens={asked} does not fit: gpu_memory={memory:g} GB at mem_fraction={fraction:g} holds "
            f"{fitting}"
        )
    return fitting if asked is None else asked


def to_json(made: Budget) -> dict[str, Any]:
    """All numbers in bytes and tokens."""
    return {
        "sizes": asdict(made.sizes),
        "components": [asdict(component) for component in made.components],
        "total_bytes": made.total,
        "second_layout_bytes": made.second_layout,
        "tokens": {"ep_per_rank": made.sizes.tokens, "ep": made.sizes.tokens * made.sizes.ranks, "tp": made.tp_tokens},
        "requests": {"ep_per_rank": made.sizes.requests, "tp": made.sizes.requests * made.sizes.ranks},
    }


def print_budget(made: Budget, console: Console) -> None:
    sizes, shape = made.sizes, made.sizes.shape
    digits = 3 if made.total > GB else 6
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GB of 10^9 bytes, one rank")
    for title in ("both layouts", "EP alone", "TP alone"):
        table.add_column(title, justify="right")
    for name in dict.fromkeys(component.name for component in made.components):
        parts = {component.column: component for component in made.components if component.name == name}
        cells = (parts.get(column) for column in _COLUMNS)
        table.add_row(
            name, *("" if c is None else f"{'~' if c.source else ''}{c.nbytes / GB:.{digits}f}" for c in cells)
        )
    table.add_section()
    sums = (sum(c.nbytes for c in made.components if c.column == column and not c.host) for column in _COLUMNS)
    table.add_row("sum on the device", *(f"{total / GB:.{digits}f}" for total in sums))
    console.print(table)
    heads, holders = kv_heads_per_rank(shape.kv_heads, sizes.ranks), holders_per_head(shape.kv_heads, sizes.ranks)
    lines = [
        "",
        f"Total {made.total / GB:.{digits}f} GB. Of them TP beside EP costs {made.second_layout / GB:.{digits}f} GB, "
        f"{made.second_layout / made.total:.1%}.",
        f"EP: {sizes.tokens:,} KV tokens and {sizes.requests:,} requests a rank, {sizes.tokens * sizes.ranks:,} tokens "
        f"in all.",
        f"TP: {made.tp_tokens:,} KV tokens and {sizes.requests * sizes.ranks:,} requests in all.",
        f"KV heads a rank: {shape.kv_heads} in EP, {heads} in TP. Ranks that hold the same head in TP: {holders}.",
    ]
    if sources := sorted({component.source for component in made.components if component.source}):
        lines.append(f"~ is an estimate ({'; '.join(sources)}). The rest follows from the model.")
    console.print("\n".join(lines), highlight=False)
