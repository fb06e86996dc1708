"""Committing batches of events on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_pgchange.errors import ConsumerBusy, InvalidArgument, ServerUnavailable
from airflow_pgchange.events.event import Row
from airflow_pgchange.events.publishing import copy_rows, insert_if_absent, with_ids
from airflow_pgchange.feeds.connections import connect

PASSING = (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction, ServerUnavailable, ConsumerBusy)
"""What another try may mend: a server that is away, stops, or has become a standby; a deadlock; a lock that lasts for
longer than ``lock_timeout``."""


@dataclass(frozen=True)
class RefusedEvent:
    """An event that PostgreSQL would not take, and why."""

    row: Row
    error: Exception


class Sender:
    """Commits batches, each once though the answer to a commit was lost, if what is tried again has the same ids.

    ``in_doubt``: a try on this batch may have committed; False for another batch. Raises ``PASSING`` where another try
    may do: after ``close``, which lets go of the connection.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.Connection[Any] | None = None
        self.in_doubt = False

    def with_ids(self, rows: list[Row]) -> list[Row]:
        """The rows with ids, where they have none; connects if there is no connection."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._conninfo, primary=True)
        return with_ids(self._connection, rows)

    def commit(self, rows: list[Row]) -> list[RefusedEvent]:
        """Commit all rows that PostgreSQL takes, which have ids; the others."""
        return self._commit(rows, insert_if_absent if self.in_doubt else copy_rows)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _commit(
        self, rows: list[Row], write: Callable[[psycopg.Connection[Any], list[Row]], None]
    ) -> list[RefusedEvent]:
        assert self._connection is not None
        try:
            with self._connection.transaction():
                write(self._connection, rows)
                # A connection that is lost from here on may have committed all the same.
                self.in_doubt = True
        # A batch may be too much for a statement_timeout; one event alone is never refused for that.
        except (InvalidArgument, psycopg.errors.QueryCanceled) as error:
            if len(rows) == 1:
                if isinstance(error, psycopg.errors.QueryCanceled):
                    raise
                return [RefusedEvent(rows[0], error)]
            half = len(rows) // 2
            return self._commit(rows[:half], write) + self._commit(rows[half:], write)
        return []
