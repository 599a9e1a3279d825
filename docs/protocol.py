"""Draws docs/protocol.svg: `python docs/protocol.py`."""

from pathlib import Path

from architecture import ARENA, CARD, EP, INK, TP, arrow, box, text

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


def path(points: str) -> str:
    return f'<path d="{points}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>'


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Arial, DejaVu Sans, '
        'sans-serif" role="img">',
        "<title>States of a switch on every rank, and how it ends</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{CARD}"/>',
    ]
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
