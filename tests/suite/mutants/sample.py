"""All mutants of a tree, and a seeded sample that is spread over feeds, files and kinds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from itertools import groupby, zip_longest
from pathlib import Path

from tests.suite.mutants import python, script
from tests.suite.mutants.mutant import Mutant, mutants

_PATTERNS = ("airflow_pgchange/**/*.py", "sql/*/[0-9]*.sql")


def files(root: Path, only: str = "*") -> list[str]:
    """Return the files of which mutants are made."""
    found = (str(path.relative_to(root)) for pattern in _PATTERNS for path in root.glob(pattern))
    return sorted(file for file in found if fnmatch(file, only))


def possible(root: Path, only: str = "*") -> list[Mutant]:
    """Return every mutant of the files that match a pattern."""
    return [mutant for file in files(root, only) for mutant in of_file(file, (root / file).read_text())]


def of_file(file: str, text: str) -> list[Mutant]:
    language = python if file.endswith(".py") else script
    return mutants(file, text, language.edits(text), language.places(text))


def sample(every: Iterable[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants.

    Feeds take turns, within a feed its files, and within a file the kinds of faults. A longer sample begins with the
    shorter sample.
    """

    def chance(*names: str) -> str:
        return hashlib.sha256("\0".join((str(seed), *names)).encode()).hexdigest()

    def spread(found: Iterable[Mutant], levels: tuple[str, ...], within: str) -> list[Mutant]:
        if not levels:
            return sorted(found, key=lambda mutant: chance(mutant.id))

        def named(mutant: Mutant) -> str:
            return str(getattr(mutant, levels[0]))

        groups = {name: list(group) for name, group in groupby(sorted(found, key=named), key=named)}
        # Each group has its own order. With the same order, one kind would come first in all files.
        order = sorted(groups, key=lambda name: chance(within, name))
        return list(_in_turn([spread(groups[name], levels[1:], name) for name in order]))

    return spread(every, ("feed", "file", "kind"), "")[:count]


def _in_turn(lists: list[list[Mutant]]) -> Iterator[Mutant]:
    for turn in zip_longest(*lists):
        yield from (mutant for mutant in turn if mutant is not None)
