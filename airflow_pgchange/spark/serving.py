"""An application at work beside an operator, which hands it one batch, or one after another."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from airflow_pgchange.spark import request

LOOK_EVERY = 0.02
"""Seconds between two looks at what an application has done."""


class Serving:
    """One application, on a thread of its own, with a folder that only this user can read, which goes with it.

    ``kill`` ends what was started; it is called until that has ended, so it may find nothing to end yet.
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
        """Whether it waits for another batch."""
        return self._runs and request.wanted(self.folder)

    @property
    def failure(self) -> BaseException | None:
        """What it failed on, once it has ended."""
        return None if self._runs else self._error

    def next_manifest(self) -> Path:
        """Where it is to write what it staged of the next batch."""
        self._handed += 1
        return self.folder / f"manifest-{self._handed}.json"

    def begin(self, run: Callable[[], object]) -> None:
        """Have it run, by a function that returns when it has ended well, and raises if it has not."""
        context = contextvars.copy_context()

        def work() -> None:
            try:
                context.run(run)
            except BaseException as error:  # noqa: BLE001
                self._error = error

        # The kernel ends what was started with the thread that started it, not before: it lasts as long.
        self._thread = threading.Thread(target=work, name="pgchange-spark", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once it has served its batch: it wants another, or has ended well. Raises what it failed on."""
        while self._runs and not self.wants_more:
            self._rest()
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        """Tell it that there are no more, and wait for its end."""
        request.end(self.folder)
        while self._runs:
            self._rest()

    def stop(self) -> None:
        """End it; from another thread, or from a signal's handler."""
        self._to_end = True
        self._kill()

    def close(self) -> None:
        """End it if it still runs, and remove its folder."""
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
