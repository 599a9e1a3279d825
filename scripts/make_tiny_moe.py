"""Makes a small random Qwen3-MoE checkpoint: `python scripts/make_tiny_moe.py PATH [--seed N] [--experts E] ...`."""

from pathlib import Path

import typer

from recipes.tiny_moe import make_tiny_moe


def main(
    path: Path,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    experts: int = 8,
    top_k: int = 2,
    intermediate: int = 64,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
) -> None:
    """Write the checkpoint to PATH. Sizes: intermediate is that of one expert, head_dim that of one attention head."""
    shape = {
        "layers": layers,
        "hidden": hidden,
        "experts": experts,
        "top_k": top_k,
        "intermediate": intermediate,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    try:
        made = make_tiny_moe(path, seed=seed, **shape)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"wrote {made}")


if __name__ == "__main__":
    typer.run(main)
