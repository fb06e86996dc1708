"""Run a command, measure the cost of all its descendants, and kill those that remain."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 10.0
"""Seconds that the child processes of a command get to end by themselves."""


@dataclass(frozen=True)
class Ended:
    code: int
    wall: float
    cpu: float
    """The CPU seconds of the command, of its children, and of servers that it started."""
    left: Sequence[str]
    """The command lines of the processes that the command started and did not stop. They were killed."""


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run a command to its end, and count what it and all its descendants used.

    On Linux those that lose their parent, as a server does that was put in the background, come to this process. A
    terminated run terminates its command, ends what the command leaves, and raises SystemExit.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before, began = _children(), time.monotonic()
    process = subprocess.Popen(command, env=environment, cwd=cwd)
    terminated = []

    def terminate(number: int, _: object) -> None:
        terminated.append(number)
        process.terminate()

    former = signal.signal(signal.SIGTERM, terminate)
    code = _wait_for(process.pid)
    left = _end_what_is_left()
    signal.signal(signal.SIGTERM, former)
    if terminated:
        sys.exit(128 + terminated[0])
    return Ended(code, time.monotonic() - began, _children() - before, left)


def _wait_for(pid: int) -> int:
    while True:
        try:
            ended, status = os.wait()
        except KeyboardInterrupt:
            # The command got the signal, too, and ends by itself.
            continue
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _end_what_is_left() -> list[str]:
    deadline, left = time.monotonic() + PATIENCE, dict[int, str]()
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return list(left.values())
        if ended == 0:
            if time.monotonic() > deadline:
                for pid in _orphans():
                    with suppress(OSError):
                        left[pid] = Path("/proc", str(pid), "cmdline").read_text().replace("\0", " ").strip()
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process runs. A zombie, whose parent has not waited for it yet, does not."""
    return state(pid) not in (None, "Z")


def state(pid: int) -> str | None:
    """Return the letter of the state of a process, as the kernel shows it; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # The process may end while its file is read.
        return None


def _orphans() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def said_with(archive: Path, code: str, folder: Path) -> str:
    """Run code in a new Python process, in a folder, with only an archive on its path. Return the output."""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(archive)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
