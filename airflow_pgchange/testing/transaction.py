"""The consumer transaction of a test. It claims no batch and moves no consumer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self, cast

import psycopg

from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.testing.recorded_connection import RecordedConnection


class FakeTransaction(ConsumerTransaction):
    """A transaction with one batch of the test.

    Writes go to ``connection``, and are committed if the block ends after ``ack``. A callable sees the same behaviour
    as in a ConsumerTransaction. ``ack`` uses a savepoint and retries after a deadlock. A block that ends without
    ``ack`` raises an error.
    """

    def __init__(
        self,
        feed: Feed,
        batch: Batch,
        changes: Sequence[Change],
        connection: psycopg.Connection[Any] | RecordedConnection,
    ) -> None:
        super().__init__(feed, "")
        self.batch = batch
        self._changes = changes
        self.connection = cast("psycopg.Connection[Any]", connection)
        self._keeper = cast("psycopg.Connection[Any]", RecordedConnection())

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(self.connection.transaction())
            opened.callback(self._close_stream)
            self._open = opened.pop_all()
        self.progress.begin("process")
        return self

    def changes(self) -> Iterator[Change]:
        self._close_stream()
        self._stream = self.progress.counted(self._given(), len(self._changes))
        return self._stream

    def ping(self) -> None:
        """Do nothing: no other process can take the batch of a test."""

    def cancel(self) -> None:
        """Do nothing: no other thread uses the connection."""

    def _given(self) -> Generator[Change, None, None]:
        yield from self._changes

    def _note(self, error: BaseException | None) -> None:
        """Do nothing: there is no claim with which an error could be recorded."""
