"""Draws docs/protocol.svg: `python docs/protocol.py`."""

from pathlib import Path

from architecture import ARENA, EP, TP, arrow, box, card, path, text

WIDTH, HEIGHT = 960, 330
STEPS = {  # title → what it does; the votes are those of all ranks
    "settle": "nothing in flight",
    "plan": "reserve places",
    "agree": "all ranks vote",
    "move": "weights, KV",
    "verify": "compare digests",
    "agree ": "all ranks vote",
    "commit": "select the layout",
}


def draw() -> str:
    parts = card(WIDTH, HEIGHT, "States of a switch on every rank, and how it ends")
    for number, (title, line) in enumerate(STEPS.items()):
        left = 18 + 134 * number
        fill = EP if title.startswith("agree") else TP if title == "commit" else "#f6f8fa"
        parts.append(box(left, 24, 120, 62, title.strip(), line, fill=fill))
        if number:
            parts.append(arrow(left - 14, 55, left - 1, 55))
    parts += [
        # A refusal before the move.
        path("M346 86 V148"),
        text(352, 116, "a rank refuses", anchor="start"),
        box(266, 150, 160, 62, "abandon", "free the target's places"),
        # A fault found after the move.
        path("M748 86 V148"),
        text(754, 116, "a rank refuses", anchor="start"),
        box(668, 150, 160, 62, "roll back", "KV, weights, finish"),
        arrow(666, 181, 430, 181),
        # Ends.
        box(18, 244, 200, 62, "ends with an error", "engine and its process", fill="#f6d5d5"),
        path("M346 212 V242"),
        box(246, 244, 200, 62, "goes on in the source", "with every request", fill=ARENA),
        path("M882 86 V242"),
        box(742, 244, 200, 62, "goes on in the target", "with every request", fill=ARENA),
        text(18, 150, "an exception, a lost rank or", anchor="start"),
        text(18, 169, "a missed deadline, in any state:", anchor="start"),
        text(18, 188, "the others lose that rank", anchor="start"),
        text(18, 207, "in their next collective", anchor="start"),
        path("M118 214 V242"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
