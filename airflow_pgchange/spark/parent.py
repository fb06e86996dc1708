"""A child that ends when its parent does, however the parent ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; usable as ``preexec_fn``.

    Linux only, elsewhere it does nothing. It survives exec, so a JVM started with it ends too. It does not
    cover grandchildren.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def follow_parent() -> None:
    """Die with the parent, also where the kernel does not help: a thread looks every second.

    For a process that is already running.
    """
    parent = os.getppid()
    die_with_parent()
    threading.Thread(target=_watch, args=(parent,), name="pgchange-parent", daemon=True).start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
