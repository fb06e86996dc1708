"""The parts of a file, and the names in a piece of text."""

from __future__ import annotations

import re
from dataclasses import dataclass

OBJECT = re.compile(r'\b([a-z_]+)\."?([a-z_][\w$]*)')
DOTTED = re.compile(r"\b(?:airflow_pgchange|tests|demo)(?:\.\w+)+")
FILE = re.compile(r"[\w.-]+")
# A longer text is a script or a query: its words are not names of files.
PATH_LENGTH = 80


@dataclass(frozen=True)
class Part:
    """A function, a class, a table or another definition in a file, with its first and last line.

    ``keys`` are the names by which others use it (``sql:tube.claim``, ``py:demo.flights.replay``). ``uses`` are the
    names that it uses.
    """

    path: str
    first: int
    last: int
    keys: frozenset[str]
    uses: frozenset[str] = frozenset()
    test: bool = False


def sql_named(text: str) -> set[str]:
    """Return the names in a text that look like an SQL object with its schema."""
    return {f"sql:{schema}.{name}" for schema, name in OBJECT.findall(text)}


def named(text: str) -> set[str]:
    """Return the SQL objects, modules and files that a text may name."""
    found = sql_named(text) | {f"py:{dotted}" for dotted in DOTTED.findall(text)}
    if len(text) < PATH_LENGTH:
        found |= {f"file:{word}" for word in FILE.findall(text)}
    return found
