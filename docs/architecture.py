"""Draws docs/architecture.svg: `python docs/architecture.py`. An opaque card reads on light and dark pages."""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 500
INK, LINE, CARD, BOX = "#1f2328", "#6e7781", "#ffffff", "#f6f8fa"
EP, TP, ARENA = "#fbe3b0", "#b9dcf2", "#cdeadf"


def text(x: float, y: float, content: str, size: int = 13, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{INK}">'
        f"{escape(content)}</text>"
    )


def box(x: float, y: float, width: float, height: float, title: str, *lines: str, fill: str = BOX) -> str:
    middle = y + height / 2 - 9 * len(lines) + 5
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>',
        text(x + width / 2, middle, title, 15, weight="bold"),
    ]
    parts += [text(x + width / 2, middle + 19 * number, line) for number, line in enumerate(lines, start=1)]
    return "\n".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" '
        f'marker-end="url(#head)"{start}/>'
    )


def path(points: str) -> str:
    return f'<path d="{points}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>'


def card(width: int, height: int, title: str) -> list[str]:
    """The picture's beginning: an opaque card, and the heads of its arrows."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Arial, DejaVu Sans, '
        'sans-serif" role="img">',
        f"<title>{title}</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="10" fill="{CARD}"/>',
    ]


def rank(x: float, name: str) -> list[str]:
    """One scheduler process, 390 wide."""
    slots = ["0", "1", "2", "...", "L"]
    parts = [
        f'<rect x="{x}" y="160" width="390" height="315" rx="8" fill="none" stroke="{LINE}" stroke-dasharray="5 4"/>',
        text(x + 14, 181, name, 15, "start", "bold"),
        box(x + 15, 192, 360, 62, "SGLang scheduler", "policy, coordinator, request handover"),
        arrow(x + 100, 254, x + 100, 282),
        arrow(x + 290, 254, x + 290, 282),
        box(x + 15, 284, 170, 62, "EP runner", "for the burst", fill=EP),
        box(x + 205, 284, 170, 62, "TP runner", "for the tail", fill=TP),
        arrow(x + 100, 346, x + 100, 370),
        arrow(x + 290, 346, x + 290, 370),
        f'<rect x="{x + 15}" y="372" width="360" height="90" rx="6" fill="{ARENA}" stroke="{LINE}"/>',
        text(x + 195, 392, "arena: expert weights and KV", 15, weight="bold"),
        text(x + 195, 454, "slot i: layer i in TP, layer i - 1 in EP"),
    ]
    for number, slot in enumerate(slots):
        left = x + 45 + 60 * number
        parts.append(f'<rect x="{left}" y="402" width="60" height="34" fill="{CARD}" stroke="{LINE}"/>')
        parts.append(text(left + 30, 424, slot))
    return parts


def draw() -> str:
    parts = [
        *card(
            WIDTH, HEIGHT, "Trainer, RolloutActor, SwitchingEngine, and P ranks that each hold an EP and a TP runner"
        ),
        box(30, 24, 220, 76, "Trainer", "your RL loop"),
        box(370, 24, 220, 76, "RolloutActor", "Ray actor: steps, reports"),
        box(710, 24, 220, 76, "SwitchingEngine", "sglang.Engine, checks rows"),
    ]
    for x in (250, 590):
        parts += [arrow(x + 4, 62, x + 116, 62, both=True)]
    parts += [
        text(310, 52, "prompts, weights"),
        text(310, 82, "samples, reports"),
        text(650, 52, "requests"),
        text(650, 82, "tokens, records"),
        arrow(820, 100, 820, 158),
        path("M820 130 H225 V156"),
        text(480, 122, "one scheduler process a rank; always P workers, in both layouts"),
        *rank(30, "rank 0"),
        *rank(540, "rank P - 1"),
        arrow(424, 223, 536, 223, both=True),
        text(480, 213, "every step:"),
        text(480, 243, "new requests,"),
        text(480, 260, "decision"),
        arrow(424, 417, 536, 417, both=True),
        text(480, 407, "at a switch:"),
        text(480, 437, "experts and KV,"),
        text(480, 454, "all-to-all"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
