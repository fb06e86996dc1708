"""Named steps of a process's work, and a process that kills itself at one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.feeds import ConsumerTransaction

Reached = Callable[[str], None]
OF_A_BATCH = ("claimed", "written", "acked", "committed")
"""The steps of a consumer transaction, in their order. It writes its results before it acknowledges the batch."""
OF_A_WRITER = ("before the commit", "prepared", "after the commit")


@dataclass(frozen=True)
class Order:
    """An order to a process to kill itself at a step: a file that contains the step's name."""

    file: Path

    def give(self, step: str) -> None:
        draft = self.file.with_suffix(".draft")
        draft.write_text(step)
        draft.rename(self.file)

    def withdraw(self) -> bool:
        """Withdraw the order. Return whether that was in time."""
        with suppress(FileNotFoundError):
            self.file.unlink()
            return True
        return False

    def obey(self, step: str) -> None:
        """Kill this process if it is ordered to do so at this step."""
        with suppress(FileNotFoundError):
            if self.file.read_text() == step:
                # Whoever moves the file wins: either the worker obeys the order, or the order was withdrawn.
                self.file.rename(self.file.with_suffix(".obeyed"))
                os.kill(os.getpid(), signal.SIGKILL)


def follow_batches(reached: Reached, steps: Collection[str] = OF_A_BATCH) -> None:
    """Call ``reached`` at these steps of each consumer transaction of this process."""
    claim, ack, leave = ConsumerTransaction.claim, ConsumerTransaction.ack, ConsumerTransaction.__exit__

    def at(step: str) -> None:
        if step in steps:
            reached(step)

    @wraps(claim)
    def claimed(transaction: ConsumerTransaction, *arguments: Any, **named: Any) -> Any:
        batch = claim(transaction, *arguments, **named)
        if batch is not None:
            at("claimed")
        return batch

    @wraps(ack)
    def acked(transaction: ConsumerTransaction, write: Any = None) -> None:
        def written(connection: psycopg.Connection[Any]) -> None:
            if write is not None:
                write(connection)
            at("written")

        ack(transaction, written)
        at("acked")

    @wraps(leave)
    def left(transaction: ConsumerTransaction, *raised: Any) -> None:
        """Reach the step before the next claim, which reports the commit to the source."""
        leave(transaction, *raised)
        if transaction._acked:
            at("committed")

    ConsumerTransaction.claim = claimed  # type: ignore[method-assign]
    ConsumerTransaction.ack = acked  # type: ignore[method-assign]
    ConsumerTransaction.__exit__ = left  # type: ignore[method-assign]


def writers_connection(reached: Reached) -> type[psycopg.Connection[Any]]:
    """Return a class of connections that call ``reached`` at the steps of a writer."""

    class Connection(psycopg.Connection[Any]):
        def execute(self, query: Any, *arguments: Any, **named: Any) -> Any:
            if query == "commit":
                reached("before the commit")
            elif isinstance(query, str) and query.startswith("commit prepared"):
                reached("prepared")
            result = super().execute(query, *arguments, **named)
            if isinstance(query, str) and query.startswith("commit"):
                reached("after the commit")
            return result

    return Connection
