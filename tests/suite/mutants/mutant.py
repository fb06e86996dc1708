"""A mutant: a small change of a file."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, order=True)
class Edit:
    """Text to put in the place of other text."""

    start: int
    end: int
    text: str
    kind: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.text + text[self.end :]

    def moved(self, by: int) -> Edit:
        return Edit(self.start + by, self.end + by, self.text, self.kind)


@dataclass(frozen=True)
class Mutant:
    """An edit of a file. Its id stays the same if the file changes elsewhere, or if its function moves within the
    folder."""

    id: str
    file: str
    line: int
    place: str
    kind: str
    before: str
    after: str
    start: int
    end: int

    @property
    def feed(self) -> str:
        """The system or the subpackage to which the file belongs."""
        folders = PurePosixPath(self.file).parts[1:-1]
        return folders[0] if folders else "package"

    def apply(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]

    def diff(self, text: str) -> str:
        old, new = text.splitlines(), self.apply(text).splitlines()
        return "\n".join(difflib.unified_diff(old, new, self.file, self.file, lineterm="", n=1))


def mutants(file: str, text: str, edits: Iterable[Edit], place: Callable[[int], str]) -> list[Mutant]:
    """Return the edits of a file in the order of the text. Equal edits in one place are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for edit in sorted(set(edits)):
        before = text[edit.start : edit.end]
        lines = _lines(text, edit.start, edit.end)
        where = place(edit.start)
        alike = "\0".join((_scope(file, where), where, edit.kind, lines, before, edit.text))
        mark = hashlib.sha256(f"{alike}\0{seen[alike]}".encode()).hexdigest()[:10]
        seen[alike] += 1
        line = text.count("\n", 0, edit.start) + 1
        found.append(
            Mutant(mark, file, line, place(edit.start), edit.kind, before, edit.text, edit.start, edit.end)
        )
    return found


def _scope(file: str, place: str) -> str:
    """Return the scope in which the names of places are unique.

    For SQL the scope is the folder, because a function may move to another file of the folder.
    """
    path = PurePosixPath(file)
    return str(path.parent) if path.suffix == ".sql" and "." in place else file


def _lines(text: str, start: int, end: int) -> str:
    """Return the lines that an edit changes, with single spaces."""
    last = text.find("\n", end)
    whole = text[text.rfind("\n", 0, start) + 1 : last if last >= 0 else len(text)]
    return " ".join(whole.split())
