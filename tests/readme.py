"""The examples of the README and of the guides."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

ROOT = Path(__file__).parents[1]
DATABASE = '"host=localhost dbname=shop"'


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text()
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return found


class Guide:
    """Runs the examples of one section of a page after another; ``names`` is what those in Python define."""

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
        """The answers of the section's SQL that has any."""
        answers = []
        for language, example in re.findall(r"```(\w+)\n(.*?)```", self.sections[section], flags=re.DOTALL):
            if language == "python":
                pairs = [*replaced, self._replaced]
                exec(functools.reduce(lambda text, pair: text.replace(*pair), pairs, example), self.names)
            else:
                assert language == "sql"
                assert self._connection is not None
                cursors = [self._connection.execute(each) for each in example.split(";") if each.strip()]
                answers += [cursor.fetchall() for cursor in cursors if cursor.description]
        return answers
