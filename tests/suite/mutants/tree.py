"""Copies of the working tree, in which mutants live and tests run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.suite import room
from tests.suite.mutants.mutant import Mutant
from tests.suite.processes import runs
from tests.suite.run import environment

LOOK = 0.2
"""The seconds between two checks of a run."""
PYTEST = "import os, sys, pytest; code = pytest.main(); sys.stdout.flush(); os._exit(code)"
"""End the process when the tests have ended, because a failed test may leave a thread for which Python would wait."""
NO_TESTS = 5
"""The exit code of pytest if all selected tests are left out."""
FAILED = re.compile(r"(?:FAILED|ERROR) ([^\s\[]+\.py[^\s\[]*(?:\[.*?\](?= - |$))?)")
"""A line of pytest's summary, with the name of the test. The message follows `` - ``, which parameters can hold, too."""


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended.

    ``how`` is ``passed``, ``failed`` or ``timeout``, ``by`` the first test that failed, and ``seconds`` the duration.
    """

    how: str
    by: str
    seconds: float


def tracked(root: Path) -> list[str]:
    """Return the files of the working tree that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(file for file in set(told.split("\0")) if file and (root / file).is_file())


def digest(root: Path) -> str:
    """A short hash of the code from which mutants are made. It does not depend on the tests."""
    total = hashlib.sha256()
    for file in tracked(root):
        if not file.startswith(("airflow_pgchange/", "sql/")):
            continue
        total.update(file.encode() + b"\0" + hashlib.sha256((root / file).read_bytes()).digest())
    return total.hexdigest()[:12]


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Yield a copy of the working tree that uses the same installed packages."""
    with TemporaryDirectory(prefix="mutants-", dir=room.parent()) as folder:
        copy = Path(folder) / "tree"
        # The servers of the tests may run as another user.
        Path(folder).chmod(0o755)
        for file in tracked(root):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, copy / file)
        if (root / ".venv").exists():
            (copy / ".venv").symlink_to((root / ".venv").resolve())
        yield copy


@contextmanager
def mutated(copy: Path, mutant: Mutant) -> Iterator[None]:
    """Put a mutant in the place of its file, until the end of the block."""
    path = copy / mutant.file
    text = path.read_text()
    try:
        _write(path, mutant.apply(text))
        yield
    finally:
        _write(path, text)


def _write(path: Path, text: str) -> None:
    """Write a file, and delete its bytecode.

    Python recognises outdated bytecode by the size and the time of the file in seconds. Another mutant may have the
    same size and time.
    """
    path.write_text(text)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run(copy: Path, python: Path, files: list[str], limit: float, stop: threading.Event) -> Outcome:
    """Run test files in a copy until the first failure. At the end, kill every process that they have started."""
    with TemporaryDirectory(prefix="run-", dir=copy.parent, ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        scratch.chmod(0o755)
        command = [str(python), "-c", PYTEST, "-x", "-q", "-p", "no:randomly", *files]
        room_of_its_own = {room.MINE: folder, "TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
        of_suite = environment() | room_of_its_own | {"PYTHONPATH": str(copy)}
        begun = time.monotonic()
        with (scratch / "output").open("w") as output:
            process = subprocess.Popen(
                command, cwd=copy, env=of_suite, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = _awaited(process, limit, stop)
            finally:
                _end(process, scratch)
        seconds = round(time.monotonic() - begun, 1)
        lines = (scratch / "output").read_text(errors="replace").splitlines()
    if code is None:
        return Outcome("timeout", "", seconds)
    passed = code in (0, NO_TESTS)
    return Outcome("passed" if passed else "failed", "" if passed else _failure(lines), seconds)


def slowness() -> float:
    """Return how many times as long a command takes now as on an idle machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _awaited(process: subprocess.Popen[bytes], limit: float, stop: threading.Event) -> int | None:
    """Wait for a process, and return its exit code.

    Return None if it does not end within ``limit`` seconds. On a busy machine the limit is longer in proportion.
    """
    while limit > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK)
        if stop.is_set():
            raise InterruptedError("the trial was stopped")
        limit -= LOOK / slowness()
    return None


def _failure(lines: list[str]) -> str:
    """Return the first test that failed. Return an empty text if no test ran."""
    told = [found for line in lines if (found := FAILED.match(line))]
    return told[0][1] if told else ""


def _end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """End a run and all that it started: its process group, the servers in its folder, and processes with its
    environment."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    servers = [_pid(path) for path in scratch.glob("**/postmaster.pid")]
    deadline = time.monotonic() + 10
    # Kill again, because a killed process may have started another before.
    while left := [*filter(runs, servers), *_children(scratch)]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)


def _pid(path: Path) -> int:
    return int(path.read_text().split()[0])


def _children(scratch: Path) -> list[int]:
    """Return the processes that a run has left. They are recognised by the run's folder in their environment."""
    mark = f"TMPDIR={scratch}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
