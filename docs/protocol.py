"""Draws docs/protocol.svg: `python docs/protocol.py`."""

from pathlib import Path

from architecture import ARENA, EP, TP, arrow, box, card, path, text

WIDTH, HEIGHT = 1200, 330
STEP = 132  # from one box to the next
STEPS = (  # what each does; the votes are those of all ranks
    ("settle", "nothing in flight"),
    ("weights", "begin to move"),
    ("share", "tell requests"),
    ("prepare", "take places"),
    ("agree", "all ranks vote"),
    ("KV", "layer by layer"),
    ("verify", "digests of KV"),
    ("agree", "all ranks vote"),
    ("commit", "the new layout"),
)


def middle(number: int) -> int:
    """Where the box of a step has its middle."""
    return 18 + STEP * number + 54


def draw() -> str:
    parts = card(WIDTH, HEIGHT, "States of a switch on every rank, and how it ends")
    for number, (title, line) in enumerate(STEPS):
        left = middle(number) - 54
        fill = EP if title == "agree" else TP if title == "commit" else "#f6f8fa"
        parts.append(box(left, 24, 108, 62, title, line, fill=fill))
        if number:
            parts.append(arrow(left - 22, 55, left - 1, 55))
    parts += [
        # A refusal, or bytes that differ.
        path(f"M{middle(1)} 86 V128 H{middle(7)}"),
        *(path(f"M{middle(number)} 86 V128") for number in (4, 5)),
        path(f"M{middle(7)} 86 V148"),
        text(middle(1) + 8, 120, "bytes of a layer differ, or a rank refuses", anchor="start"),
        box(middle(7) - 80, 150, 160, 62, "roll back", "what has moved"),
        box(middle(3) - 80, 150, 160, 62, "abandon", "free the target's places"),
        arrow(middle(7) - 82, 181, middle(3) + 84, 181),
        # Ends.
        box(18, 244, 200, 62, "ends with an error", "the engine, on all ranks", fill="#f6d5d5"),
        path(f"M{middle(3)} 212 V242"),
        box(middle(3) - 100, 244, 200, 62, "goes on in the source", "with every request", fill=ARENA),
        path(f"M{middle(8)} 86 V242"),
        box(WIDTH - 218, 244, 200, 62, "goes on in the target", "with every request", fill=ARENA),
        text(18, 150, "an exception in what ranks do", anchor="start"),
        text(18, 169, "together, a lost rank or a missed", anchor="start"),
        text(18, 188, "deadline, in any state; a second", anchor="start"),
        text(18, 207, "fault while rolling back", anchor="start"),
        path("M118 214 V242"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
