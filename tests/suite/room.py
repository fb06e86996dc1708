"""The folder in which a run of the tests keeps its servers and files: in memory, if there is room."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
ENOUGH = 4 * 2**30
"""Bytes that must be free in memory; three workers with their clusters and Spark's files take less than half of it."""
PREFIX = "pgchange-tests-"
MINE = "PGCHANGE_TEST_ROOM"


def take() -> Path:
    """The folder of this run. Its first process creates and removes it; all processes that it starts use it."""
    if MINE in os.environ:
        return Path(os.environ[MINE])
    for left in parent().glob(f"{PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(PREFIX)).exists():
            _clear(left)
    folder = parent() / f"{PREFIX}{os.getpid()}"
    folder.mkdir()
    # The operating system's user of PostgreSQL must be able to reach its files.
    folder.chmod(0o755)
    atexit.register(_clear_if_mine, folder, os.getpid())
    # Spark has its own setting, and Java does not read TMPDIR.
    os.environ |= {MINE: str(folder), "TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)}
    tempfile.tempdir = str(folder)
    return folder


def parent() -> Path:
    """Return the folder in which the folders of runs are."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH:
        return MEMORY
    return Path(tempfile.gettempdir())


def _clear_if_mine(folder: Path, owner: int) -> None:
    """Clear the folder only in the process that made it: the end of a fork is not the end of the run."""
    if os.getpid() == owner:
        _clear(folder)


def _clear(folder: Path) -> None:
    """End the servers that a killed run left in a folder, and remove it."""
    for lock in folder.glob("*/data/postmaster.pid"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(lock.read_text().split()[0])
            if str(lock.parent).encode() in Path("/proc", str(pid), "cmdline").read_bytes():
                os.kill(pid, signal.SIGQUIT)
    shutil.rmtree(folder, ignore_errors=True)
