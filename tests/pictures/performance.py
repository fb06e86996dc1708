"""The pictures of the page on performance: ``python -m tests.pictures.performance`` draws the recorded figures anew."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path

from tests.pictures.diagrams import COLORS, FONT, HEAD, IMAGES, MARGIN

FIGURES = IMAGES / "performance.json"
WIDTH, LABEL, LONGEST = 860, 400, 340
"""Pixels of a picture, of its labels, and of its longest bar."""
BAR, GAP = 18, 12
"""Pixels of the height of a bar, and between two pairs."""


@dataclass(frozen=True)
class Pair:
    """A figure of ours beside that of the other tool, which is 1 if the figure is a ratio.

    ``shown`` is the range of several runs, with ``ours`` in its middle. ``measures`` and ``measures_other`` name the
    lines of ``make bench`` that have the figures.
    """

    label: str
    ours: float
    other: float
    shown: str = ""
    measures: str = ""
    measures_other: str = ""


@dataclass(frozen=True)
class Picture:
    """A comparison: its pairs in one unit, with the machine and the command that measured them."""

    name: str
    title: str
    unit: str
    other: str
    machine: str
    command: str
    pairs: tuple[Pair, ...]

    @property
    def path(self) -> Path:
        return IMAGES / f"performance-{self.name}.svg"

    def measured(self, figures: Mapping[str, float], machine: str) -> Picture:
        """Return the picture with new figures, or as it is if a run has not measured all of them.

        All figures of a picture come from one machine.
        """
        names = [name for pair in self.pairs for name in (pair.measures, pair.measures_other)]
        if (
            not all(pair.measures for pair in self.pairs)
            or not {name for name in names if name} <= figures.keys()
        ):
            return self
        pairs = [
            replace(
                pair,
                ours=figures[pair.measures],
                shown="",
                other=figures.get(pair.measures_other, pair.other),
            )
            for pair in self.pairs
        ]
        return replace(self, machine=machine, pairs=tuple(pairs))

    def svg(self) -> str:
        rows = [f"  {line}" for number, pair in enumerate(self.pairs) for line in self._bars(number, pair)]
        height = 2 * MARGIN + 64 + len(self.pairs) * (2 * BAR + GAP)
        head = HEAD.format(width=WIDTH, height=height, font=FONT, title=escape(self.title, quote=True))
        told = f"{self.machine}: {self.command}"
        return "\n".join(
            [
                head.rstrip("\n"),
                _text(MARGIN, MARGIN + 12, self.title, size=15),
                _text(MARGIN, MARGIN + 34, f"Blue: this package. Grey: {self.other}. In {self.unit}."),
                *rows,
                _text(MARGIN, height - 14, told, size=11, colour="#475569"),
                "</svg>\n",
            ]
        )

    def _bars(self, number: int, pair: Pair) -> Iterable[str]:
        top = MARGIN + 48 + number * (2 * BAR + GAP)
        most = max(max(pair.ours, pair.other) for pair in self.pairs)
        yield _text(MARGIN + LABEL - 12, top + BAR + 5, pair.label, anchor="end").strip()
        told = pair.shown or f"{pair.ours:g}"
        for row, (figure, text, kind) in enumerate(
            ((pair.ours, told, "ours"), (pair.other, f"{pair.other:g}", "yours"))
        ):
            width = LONGEST * figure / most
            fill, stroke = COLORS[kind]
            y = top + row * BAR
            yield (
                f'<rect x="{MARGIN + LABEL}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{fill}" '
                f'stroke="{stroke}"/>'
            )
            yield _text(MARGIN + LABEL + width + 6, y + 13, text, size=12).strip()


def recorded() -> list[Picture]:
    """Return the pictures with the figures of the last runs."""
    return [
        Picture(**{**each, "pairs": tuple(Pair(**pair) for pair in each["pairs"])})
        for each in json.loads(FIGURES.read_text())
    ]


def record(figures: Mapping[str, float], machine: str) -> None:
    """Keep the figures of a run, by benchmark, section and name, and draw all pictures."""
    pictures = [each.measured(figures, machine) for each in recorded()]
    FIGURES.write_text(as_json(pictures))
    for each in pictures:
        each.path.write_text(each.svg())


def as_json(pictures: Sequence[Picture]) -> str:
    return json.dumps([asdict(each) for each in pictures], indent=1) + "\n"


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: float = 13, colour: str = "#0f172a"
) -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"'
    return f"  <text {place}>{escape(text)}</text>"


if __name__ == "__main__":
    record({}, "")
