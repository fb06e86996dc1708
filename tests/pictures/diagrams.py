"""The pictures of the concepts, as SVG: ``python -m tests.pictures.diagrams`` writes them anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT = 168, 58
"""The width and height of a box in pixels."""
COLUMN, ROW = 278, 112
"""The distance from one box to the next in pixels. A label of 16 characters fits between two columns."""
MARGIN = 20
COLORS = {
    "yours": ("#f8fafc", "#94a3b8"),
    "ours": ("#e0f2fe", "#0284c7"),
    "results": ("#d1fae5", "#047857"),
    "failed": ("#fee2e2", "#b91c1c"),
}
"""By kind of box: the fill and the border colour."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{font}" font-size="13" \
role="img" aria-label="{title}">
  <title>{title}</title>
  <defs>
    <marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
      <path d="M0 0 L10 5 L0 10 z" fill="#475569"/>
    </marker>
  </defs>
  <rect width="{width}" height="{height}" rx="10" fill="#ffffff" stroke="#cbd5e1"/>
"""


@dataclass(frozen=True)
class Box:
    """A box in a column and a row of the grid. Its text has a line for each part between newlines."""

    text: str
    column: float
    row: float
    kind: str = "ours"

    @property
    def middle(self) -> tuple[float, float]:
        return MARGIN + self.column * COLUMN + WIDTH / 2, MARGIN + self.row * ROW + HEIGHT / 2

    def svg(self) -> str:
        x, y = self.middle
        fill, stroke = COLORS[self.kind]
        lines = self.text.split("\n")
        first = y + 4.5 - 9 * (len(lines) - 1)
        return "\n".join(
            [
                f'  <rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
                f'fill="{fill}" stroke="{stroke}"/>',
                *(_text(x, first + 18 * number, line) for number, line in enumerate(lines)),
            ]
        )


@dataclass(frozen=True)
class Arrow:
    """An arrow from one box to another. It turns between two columns; on its way back it turns at the end."""

    start: Box
    end: Box
    label: str = ""

    def svg(self) -> str:
        (x, y), (to_x, to_y) = self.start.middle, self.end.middle
        right, down = (1 if to_x > x else -1), (1 if to_y > y else -1)
        if y == to_y:
            path = f"M{x + right * WIDTH / 2:g} {y:g} H{to_x - right * (WIDTH / 2 + 2):g}"
            place = (x + to_x) / 2, y - 8, "middle"
        elif x == to_x:
            path = f"M{x:g} {y + down * HEIGHT / 2:g} V{to_y - down * (HEIGHT / 2 + 2):g}"
            place = x + 8, (y + to_y) / 2 + 4, "start"
        elif right > 0:
            path = f"M{x + WIDTH / 2:g} {y:g} H{(x + to_x) / 2:g} V{to_y:g} H{to_x - WIDTH / 2 - 2:g}"
            place = (x + to_x) / 2 + 6, to_y - 8, "start"
        else:
            path = f"M{x - WIDTH / 2:g} {y:g} H{to_x:g} V{to_y - down * (HEIGHT / 2 + 2):g}"
            place = (x - WIDTH / 2 + to_x) / 2, y - 8, "middle"
        line = f'  <path d="{path}" stroke="#475569" stroke-width="1.6" fill="none" marker-end="url(#end)"/>'
        return line + ("\n" + _text(*place[:2], self.label, place[2], 12) if self.label else "")


@dataclass(frozen=True)
class Bar:
    """A bar on a time line or in a queue, from one column to another."""

    text: str
    start: float
    end: float
    row: float
    kind: str = "ours"

    def svg(self) -> str:
        x, to_x = (MARGIN + column * COLUMN for column in (self.start, self.end))
        y = MARGIN + self.row * ROW
        fill, stroke = COLORS[self.kind]
        return (
            f'  <rect x="{x:g}" y="{y:g}" width="{to_x - x:g}" height="30" rx="4" fill="{fill}" stroke="{stroke}"/>\n'
            + _text((x + to_x) / 2, y + 19.5, self.text)
        )


@dataclass(frozen=True)
class Mark:
    """A line across rows at a moment or at a place. It has a label above it."""

    text: str
    column: float
    first: float
    last: float

    def svg(self) -> str:
        x, y, to_y = (
            MARGIN + value * size
            for value, size in ((self.column, COLUMN), (self.first, ROW), (self.last, ROW))
        )
        line = (
            f'  <path d="M{x:g} {y:g} V{to_y:g}" stroke="#b45309" stroke-width="1.6" stroke-dasharray="5 4"/>'
        )
        return line + "\n" + _text(x, y - 6, self.text, size=12)


@dataclass(frozen=True)
class Note:
    """A line of text."""

    text: str
    column: float
    row: float

    def svg(self) -> str:
        return _text(MARGIN + self.column * COLUMN, MARGIN + self.row * ROW, self.text, "start", 12)


Shape = Box | Arrow | Bar | Mark | Note


def drawn(title: str, columns: float, rows: float, shapes: Sequence[Shape]) -> str:
    """Return an SVG with columns and rows of boxes. Arrows lie under the boxes."""
    width = 2 * MARGIN + (columns - 1) * COLUMN + WIDTH
    height = 2 * MARGIN + (rows - 1) * ROW + HEIGHT
    ordered = sorted(shapes, key=lambda shape: not isinstance(shape, Arrow))
    head = HEAD.format(width=f"{width:g}", height=f"{height:g}", font=FONT, title=escape(title))
    return head + "\n".join(shape.svg() for shape in ordered) + "\n</svg>\n"


def _text(x: float, y: float, text: str, anchor: str = "middle", size: float = 13) -> str:
    return f'  <text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="#0f172a">{escape(text)}</text>'


def main() -> None:
    from tests.pictures.concepts import CONCEPTS

    for name, svg in CONCEPTS.items():
        (IMAGES / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
