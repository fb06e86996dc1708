"""Read the README and the guides, for tests of their examples, output and links."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

ROOT = Path(__file__).parents[1]
DATABASE = '"host=localhost dbname=shop"'
TUTORIAL = "docs/tutorial/your_own_table.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")


def blocks(language: str, page: str = "README.md") -> list[str]:
    return [text for found, text in FENCE.findall((ROOT / page).read_text()) if found == language]


def statements(example: str) -> list[str]:
    """Return the statements of an SQL example, without those that consist of a comment."""
    return [each for each in example.split(";") if re.sub("--.*", "", each).strip()]


def track_payments(connection: psycopg.Connection[Any]) -> None:
    """Make and track the tutorial's table, with its three payments and an empty balance."""
    for statement in statements(blocks("sql", TUTORIAL)[0]):
        connection.execute(statement)


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading: a list for each row."""
    section = f"\n{(ROOT / page).read_text()}".split(f"\n{heading}\n")[1].split("\n#")[0]
    first = re.search(r"^(?:\|.*\|\n)+", section, flags=re.MULTILINE)
    assert first, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in first[0].splitlines()[2:]]


def in_code(text: str) -> list[str]:
    """Return the parts of a text between single backticks."""
    return re.findall(r"`([^`]+)`", text)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links and pictures."""
    yield from LINK.findall(FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the HTML anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Guide:
    """Runs the examples of a page, section after section. ``names`` are the Python names that the examples have
    defined."""

    def __init__(self, page: str, database: str, connection: psycopg.Connection[Any] | None) -> None:
        self.names: dict[str, Any] = {}
        self.text = (ROOT / page).read_text()
        self._replaced = (DATABASE, repr(database))
        self._connection = connection

    @property
    def sections(self) -> dict[str, str]:
        found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", self.text, flags=re.DOTALL | re.MULTILINE)
        return dict(found)

    def run(self, section: str, replaced: Sequence[tuple[str, str]] = ()) -> list[list[Any]]:
        """Run the SQL statements of a section, and return the results of those that have any.

        Skip its shell commands and shown results.
        """
        answers = []
        for language, example in re.findall(r"```(\w+)\n(.*?)```", self.sections[section], flags=re.DOTALL):
            if language == "python":
                pairs = [*replaced, self._replaced]
                exec(functools.reduce(lambda text, pair: text.replace(*pair), pairs, example), self.names)
            elif language not in ("sh", "text"):
                assert language == "sql"
                assert self._connection is not None
                cursors = [self._connection.execute(each) for each in example.split(";") if each.strip()]
                answers += [cursor.fetchall() for cursor in cursors if cursor.description]
        return answers
