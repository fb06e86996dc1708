"""Whether an application failed by the content of its batch. It notes this beside its manifest, for the operator.

An operator sees only that an application has ended with an error. An application notes nothing if it lost PostgreSQL,
an executor or its server, or if it was killed.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from airflow_pgchange.feeds.error_translation import is_of_the_batch

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
LONGEST_CHAIN = 20
"""The longest chain of causes of an error that is examined."""

OUTAGES = re.compile(
    r"ServerUnavailable|ConnectionLost|OperationalError|InterfaceError|ExecutorLostFailure|SparkContext was shut ?down"
    r"|Py4JNetworkError|ConnectException|ConnectionRefusedError|ConnectionResetError|FetchFailed|No space left on device"
    r"|StatusCode\.UNAVAILABLE|Stage cancelled|Job \S+ cancelled|\bOSError\b"
    r"|ExtraMissing|VersionsDiffer"
)
"""Texts in an error of Spark that show an outage. Spark quotes the errors of its executors."""


def note_errors(manifest: Path) -> None:
    """From now on, note an error that ends this process if the batch of this manifest causes it."""
    if not isinstance(sys.excepthook, _Noting):
        sys.excepthook = _Noting(sys.excepthook)
    sys.excepthook.manifest = manifest


def is_noted(manifest: Path) -> bool:
    """Whether the application has noted that the batch of this manifest caused its error."""
    return _mark(manifest).exists()


class _Noting:
    """A hook for uncaught errors. It notes an error of the batch, and then calls the previous hook."""

    def __init__(self, before: Hook) -> None:
        self.manifest: Path | None = None
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.manifest is not None and is_of_the_content(error):
            with suppress(OSError):
                _mark(self.manifest).touch()
        self._before(kind, error, trace)


def is_of_the_content(error: BaseException) -> bool:
    """Whether the content of a batch may have caused an error of an application."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < LONGEST_CHAIN:
        if not isinstance(cause, Exception) or not is_of_the_batch(cause):
            return False
        chain += traceback.format_exception_only(cause)
        cause = cause.__cause__ or cause.__context__
    return OUTAGES.search("".join(chain)) is None


def _mark(manifest: Path) -> Path:
    return manifest.with_name(manifest.name + ".failed")
