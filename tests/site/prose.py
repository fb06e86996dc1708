"""Figures of the prose of pages in Markdown, and the sentences and table cells that are too long."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.prose import Text
from tests.readme import ROOT

MEAN = 16
"""The maximum mean length of a sentence in words."""
LONGEST = 30
"""The maximum length of a sentence in words."""
LONGEST_CELL = 25
"""The maximum length of a table cell in words."""
SHARES = {"what": 2.0, "who": 0.5, "one": 4.0}
"""By word: the maximum number of occurrences in a thousand words."""
WORST = 20

LEFT_OUT = re.compile(r"^(?P<fence> *```).*?^ *```$|<!--.*?-->|^---\n.*?\n---$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
MARKUP = re.compile(r"\*\*|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)")
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE_BLOCK = re.compile(r"(?<=\n\n)(?: {4,}(?![-*\d]).*\n)+")
WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True)
class Sentence:
    """A sentence, or the text of a table cell, with its page."""

    page: str
    text: str

    @cached_property
    def words(self) -> int:
        return len(WORD.findall(self.text))

    def __str__(self) -> str:
        return f"{self.words:4} {self.page}: {self.text}"


@dataclass(frozen=True)
class Prose:
    """The sentences and the table cells of a page. The sentences are those of paragraphs and lists."""

    sentences: Sequence[Sentence]
    cells: Sequence[Sentence]

    @property
    def words(self) -> int:
        return sum(each.words for each in (*self.sentences, *self.cells))

    @property
    def mean(self) -> float:
        return sum(each.words for each in self.sentences) / max(len(self.sentences), 1)

    @cached_property
    def long(self) -> Sequence[Sentence]:
        """Return the sentences and cells that are too long, the longest first."""
        parts = [part for cell in self.cells for part in _sentences(cell.page, cell.text)]
        found = [each for each in (*self.sentences, *parts) if each.words > LONGEST]
        return sorted(found, key=lambda each: -each.words)

    @property
    def long_cells(self) -> Sequence[Sentence]:
        return [each for each in self.cells if each.words > LONGEST_CELL]

    def share(self, word: str) -> float:
        """Return how often a word occurs in a thousand words."""
        text = " ".join(each.text for each in (*self.sentences, *self.cells))
        return 1000 * len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) / max(self.words, 1)

    def is_within_limits(self) -> bool:
        shares = all(self.share(word) <= limit for word, limit in SHARES.items())
        return self.mean <= MEAN and shares and not self.long and not self.long_cells


def pages() -> dict[str, Prose]:
    """Return the prose of the README and of each page, by path."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): prose(path) for path in paths}


def prose(path: Path) -> Prose:
    name = path.relative_to(ROOT).as_posix()
    text = LINK.sub(r"\1", LEFT_OUT.sub("\n", path.read_text()))
    rows = [row for row in ROW.findall(text) if not re.fullmatch(r"[|\s:-]+", row)]
    cells = [
        Sentence(name, _plain(cell))
        for row in rows
        for cell in re.split(r"(?<!\\)\|", row[1:-1])
        if cell.strip()
    ]
    paragraphs = CODE_BLOCK.sub("\n", HEADING.sub("\n", ROW.sub("\n", text)))
    return Prose(list(_sentences(name, MARKUP.sub("", paragraphs))), cells)


def whole(found: dict[str, Prose]) -> Prose:
    return Prose(
        [each for one in found.values() for each in one.sentences],
        [each for one in found.values() for each in one.cells],
    )


def report(found: dict[str, Prose]) -> Iterator[str]:
    """Yield lines with the figures of each page and of all pages, and then the worst sentences and the cells that
    are too long."""
    every = whole(found)
    for sentence in (*every.long[:WORST], *every.long_cells):
        yield str(sentence)
    head = "".join(f"{name:>8}" for name in ("words", "mean", *SHARES, f">{LONGEST}", "cells"))
    yield f"{'page':40}{head}"
    for page, one in (*found.items(), ("all", every)):
        shares = "".join(f"{one.share(word):8.1f}" for word in SHARES)
        mark = "" if one.is_within_limits() else "  *"
        yield f"{page:40}{one.words:8}{one.mean:8.1f}{shares}{len(one.long):8}{len(one.long_cells):8}{mark}"


def _plain(text: str) -> str:
    return MARKUP.sub("", text).strip()


def _sentences(page: str, text: str) -> Iterator[Sentence]:
    for sentence in Text(page, 0, text).sentences:
        plain = re.sub(r"^(?:-|\d+\.)\s+", "", sentence)
        if WORD.search(plain):
            yield Sentence(page, plain)
