"""A deadline for calls of a catalog, because PyIceberg may wait for a server for ever."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """The deadline has passed. The server may still carry out the request."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or raise what it raises. Raises NoAnswer after ``seconds``.

    The call runs in a thread of its own. After the deadline nobody waits for this thread, even when the process ends.
    """
    ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            ended.put((context.run(call), None))
        except BaseException as error:  # noqa: BLE001
            ended.put((None, error))

    threading.Thread(target=run, name="pgchange-catalog", daemon=True).start()
    try:
        result, error = ended.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer for {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
