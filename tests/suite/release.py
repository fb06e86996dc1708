"""``make release-test``: every test on both servers, and campaigns of faults with all seeds; hours, in its own clone.

It tests the last commit. A part that passed for this very tree is not run again. So a stopped run resumes where it ended,
and several runs at a time share the parts. The summary has a line for each part.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, groupby
from pathlib import Path

from tests.suite import clusters, java, processes
from tests.suite.run import ROOT, environment

TESTED = (
    "airflow_pgchange",
    "sql",
    "dags",
    "demo",
    "docs",
    "tests",
    "README.md",
    "pyproject.toml",
    "constraints.txt",
)
MORE_SERVERS = ("16", "17", "18")
"""Only integration tests run on these: the versions between those of the two servers, and 18 with contrib."""
SEEDS = ("20130101", "7", "11")
TIMEOUT = "7200"


@dataclass(frozen=True)
class Part:
    name: str
    arguments: tuple[str, ...]
    """The arguments of the Python process that runs the part."""
    environment: dict[str, str] = field(default_factory=dict)


def parts(tree: Path) -> Iterator[Part]:
    """Yield the parts of a release, the quickest first. The seeds of a campaign take turns on the two servers."""
    yield Part("lint", ("-m", "ruff", "check", "."))
    yield Part("format", ("-m", "ruff", "format", "--check", "."))
    yield Part("types", ("-m", "mypy"))
    yield Part("unit", _pytest("system", *_files(tree, "unit")))
    for folder, found in groupby(_files(tree, "integration"), _folder):
        files = list(found)
        for server in (*clusters.SERVERS, *MORE_SERVERS):
            yield Part(f"{folder} on {server}", _pytest(server, *files))
    for path in _files(tree, "system"):
        yield Part(f"system: {Path(path).stem}", _pytest("system", path, workers="0"))
    for path in _files(tree, "chaos"):
        draws = zip(SEEDS, cycle(clusters.SERVERS), strict=False)
        for seed, server in draws if _draws(tree / path) else zip(SEEDS, clusters.SERVERS, strict=False):
            name = f"chaos: {Path(path).stem} on {server}, seed {seed}"
            yield Part(name, _pytest(server, path), {"CHAOS": "full", "SEED": seed})


def _draws(path: Path) -> bool:
    """Whether a campaign uses a seed. If not, it is the same with each seed."""
    return re.search(r"\b(SEED|Campaign)\b", path.read_text()) is not None


def _files(tree: Path, layer: str) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in (tree / "tests" / layer).rglob("test_*.py"))


def _folder(path: str) -> str:
    return Path(path).parent.name


def _pytest(server: str, *files: str, workers: str = "2") -> tuple[str, ...]:
    return (
        "-m",
        "pytest",
        "-q",
        "--release",
        "--servers",
        server,
        "-n",
        workers,
        "--dist",
        "each",
        "--timeout",
        TIMEOUT,
        *files,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite.release", description=__doc__)
    parser.add_argument("--only", default="", help="only the parts whose names contain this text")
    only = parser.parse_args().only
    state = _state()
    summary, clone = state / "summary", state / "clone"
    summary.touch()
    with taken(state / "setup", wait=True):
        if not clone.exists():
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run(["scripts/bootstrap", "test"], cwd=clone, check=True)
    failed = []
    for part in parts(clone):
        if only not in part.name:
            continue
        with taken(state / part.name.replace("/", " ")) as mine:
            if mine and f"\n{part.name}: passed" not in f"\n{summary.read_text()}":
                failed += [] if _run(part, clone, summary) else [part.name]
    print(f"{len(failed)} failed; the summary is in {summary}")
    return 1 if failed else 0


def _run(part: Part, clone: Path, summary: Path) -> bool:
    print(f"== {part.name}", flush=True)
    ended = processes.run(
        [".venv/bin/python", *part.arguments], environment() | {java.VARIABLE: ""} | part.environment, clone
    )
    # If all tests of a file need something that this server lacks, no test is left.
    fine = ended.code in (0, 5) and not ended.left
    line = f"{part.name}: {'passed' if fine else 'FAILED'}, {ended.wall:.0f} s, {ended.cpu:.0f} CPU seconds"
    with summary.open("a") as file:
        print(line, file=file)
    print(line, flush=True)
    return fine


@contextmanager
def taken(file: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file. Yield False if another run has locked it."""
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _state() -> Path:
    """Return the folder with the results of this tree."""
    listed = subprocess.run(
        ["git", "ls-tree", "HEAD", *TESTED], cwd=ROOT, check=True, capture_output=True
    ).stdout
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "airflow-pgchange" / "release" / hashlib.sha256(listed).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
