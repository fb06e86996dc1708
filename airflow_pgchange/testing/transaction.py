"""The consumer transaction of a batch that a test gives: nothing is claimed, and no consumer moves."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self, cast

import psycopg

from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.testing.recorded import RecordedConnection


class GivenTransaction(ConsumerTransaction):
    """One batch of given changes. Its results go to ``connection``, and are committed when the block ends after ``ack``.

    What a callable meets is the real transaction's: the savepoint of ``ack``, new tries after a deadlock, the error of a
    block that ends without ``ack``.
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
        """Nobody can lose a batch that a test gives."""

    def cancel(self) -> None:
        """No other thread uses the connection."""

    def _given(self) -> Generator[Change, None, None]:
        yield from self._changes

    def _note(self, error: BaseException | None) -> None:
        """There is no claim to note an error with."""
