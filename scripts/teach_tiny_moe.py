"""Makes recipes/tiny_arithmetic/checkpoint: `python scripts/teach_tiny_moe.py PATH`. Five minutes on one CPU core."""

import statistics
from pathlib import Path

import typer

from recipes.tiny_arithmetic.data import compute_score, problems
from recipes.tiny_arithmetic.teach import sample, teach


def main(path: Path, steps: int = 900, rows: int = 64, seed: int = 0, measured: int = 1024) -> None:
    """Train for STEPS batches of ROWS texts, write the checkpoint to PATH, and report on MEASURED problems."""

    def report(step: int, loss: float) -> None:
        if step % 100 == 0 or step == steps - 1:
            typer.echo(f"step {step}: loss {loss:.4f}")

    teach(path, steps=steps, rows=rows, seed=seed, report=report)
    pairs = problems(measured, seed + 1)
    for temperature in (1.0, 0.0):
        texts = sample(path, pairs, temperature)
        rewards = [compute_score("", text, str(a + b))["score"] for text, (a, b) in zip(texts, pairs, strict=True)]
        lengths = sorted(len(text) + 1 for text in texts)  # characters and the end token
        quantiles = {share: lengths[int(share * (measured - 1))] for share in (0.5, 0.9, 0.99, 1.0)}
        typer.echo(
            f"temperature {temperature}: reward {statistics.mean(rewards):.3f}, tokens mean "
            f"{statistics.mean(lengths):.1f}, " + ", ".join(f"p{100 * share:g} {n}" for share, n in quantiles.items())
        )


if __name__ == "__main__":
    typer.run(main)
