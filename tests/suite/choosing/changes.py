"""The changes since a revision, down to the lines."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Change:
    """A changed file with its changed lines; None for all lines."""

    path: str
    lines: frozenset[int] | None = None


def changes(repo: Path, base: str | None = None) -> list[Change]:
    """Return the differences from the point where this branch left the main branch: committed, uncommitted and
    untracked."""
    diff = _git(repo, "diff", "-U0", "--no-renames", "--no-color", "--no-ext-diff", _begin(repo, base))
    untracked = _git(repo, "ls-files", "--others", "--exclude-standard").splitlines()
    return sorted(
        [*_changed(diff), *(Change(path) for path in untracked if (repo / path).is_file())],
        key=lambda change: change.path,
    )


def _begin(repo: Path, base: str | None) -> str:
    """Return the revision to compare with. On the main branch that is the pushed revision, if there is any."""
    on_main = _git(repo, "branch", "--show-current").strip() == "main"
    bases = [base] if base else ["origin/main"] if on_main else ["main", "origin/main"]
    for one in bases:
        if found := _git(repo, "merge-base", one, "HEAD", demand=one == base).strip():
            return found
    return "HEAD"


def _changed(diff: str) -> Iterator[Change]:
    path, lines = "", set[int]()
    for line in [*diff.splitlines(), "diff --git"]:
        if line.startswith("diff --git"):
            if path:
                yield Change(path, frozenset(lines))
            path, lines = "", set()
        elif line.startswith(("--- a/", "+++ b/")) and not lines:
            path = line[6:].rstrip("\t")
        elif hunk := HUNK.match(line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            # If lines were only deleted, the lines before and after the gap count as changed.
            lines |= set(range(first, first + count)) or {first, first + 1}


def _git(repo: Path, *arguments: str, demand: bool = True) -> str:
    run = subprocess.run(
        ["git", "-c", "core.quotepath=off", *arguments], cwd=repo, check=False, capture_output=True, text=True
    )
    if demand and run.returncode:
        raise SystemExit(run.stderr.strip())
    return run.stdout if run.returncode == 0 else ""
