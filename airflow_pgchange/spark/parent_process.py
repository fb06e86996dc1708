"""End a child process together with its parent, however the parent ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. It can be a ``preexec_fn``.

    Does nothing on systems other than Linux. The request survives exec, so it also holds for a JVM. It does not hold
    for grandchildren.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def follow_parent() -> None:
    """End this process, which runs already, when its parent ends.

    A thread also checks every second, for systems whose kernel cannot do it.
    """
    parent = os.getppid()
    die_with_parent()
    threading.Thread(target=_watch, args=(parent,), name="pgchange-parent", daemon=True).start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
