"""An application that runs beside an operator and gets its batches from it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from airflow_pgchange.spark import request

LOOK_EVERY = 0.02
"""Seconds between two checks of an application's files."""


class Serving:
    """An application, which runs in a thread of its own, and its folder, which only this user can read.

    ``kill`` ends the application. It is called until the application has ended, so it may be called before there is a
    process.
    """

    def __init__(self, kill: Callable[[], object]) -> None:
        self._made = TemporaryDirectory(prefix="pgchange-", ignore_cleanup_errors=True)
        self.folder = Path(self._made.name)
        self._kill = kill
        self._to_end = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._handed = 0

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    @property
    def wants_more(self) -> bool:
        """Whether the application waits for another batch."""
        return self._runs and request.wants_more(self.folder)

    @property
    def failure(self) -> BaseException | None:
        """The error of the application, after it has ended."""
        return None if self._runs else self._error

    def next_manifest(self) -> Path:
        """Return the path of the manifest for the next batch."""
        self._handed += 1
        return self.folder / f"manifest-{self._handed}.json"

    def begin(self, run: Callable[[], object]) -> None:
        """Run the application by a function, which returns when the application has ended and raises if it failed."""
        context = contextvars.copy_context()

        def work() -> None:
            try:
                context.run(run)
            except BaseException as error:  # noqa: BLE001
                self._error = error

        # The kernel kills a child when the thread that started it ends, so this thread lasts as long as the application.
        self._thread = threading.Thread(target=work, name="pgchange-spark", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the application has processed its batch: it asks for another batch, or has ended. Raises its error
        if it failed."""
        while self._runs and not self.wants_more:
            self._rest()
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        """Tell the application that there are no more batches, and wait for its end."""
        request.end(self.folder)
        while self._runs:
            self._rest()

    def stop(self) -> None:
        """End the application. Can be called from another thread or a signal handler."""
        self._to_end = True
        self._kill()

    def close(self) -> None:
        """End the application if it still runs, and remove its folder."""
        self._to_end = True
        while self._runs:
            self._rest()
        self._made.cleanup()

    @property
    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _rest(self) -> None:
        if self._to_end:
            self._kill()
        if self._thread is not None:
            self._thread.join(LOOK_EVERY)
