"""A base class for servers that run inside a ``with`` block."""

from __future__ import annotations

import ctypes
import signal
import sys
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends: a ``preexec_fn``. It does nothing outside Linux."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Started(ABC):
    """A server that is started at the beginning of a ``with`` block, and stopped at its end or if the start fails."""

    @abstractmethod
    def start(self) -> None:
        """Start the server, and wait until it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """Stop everything that was started, and leave nothing behind."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
