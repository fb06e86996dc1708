"""Commit batches of events on a separate connection, each exactly once."""

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
"""Errors that a retry may fix: the server is unavailable, stops, or became a standby; a deadlock; a lock that was held
longer than ``lock_timeout``."""


@dataclass(frozen=True)
class RefusedEvent:
    """An event that PostgreSQL refused, with the error."""

    row: Row
    error: Exception


class Sender:
    """Commits batches exactly once, even if the answer to a commit is lost. A retry must use the same ids.

    ``in_doubt``: whether an earlier attempt on this batch may have committed; the caller sets it to False for a new
    batch. Raises ``PASSING`` errors if a retry may help; call ``close`` before the retry.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.Connection[Any] | None = None
        self.in_doubt = False

    def with_ids(self, rows: list[Row]) -> list[Row]:
        """Return the rows with ids, generated for those without. Connects if necessary."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._conninfo, primary=True)
        return with_ids(self._connection, rows)

    def commit(self, rows: list[Row]) -> list[RefusedEvent]:
        """Commit all rows that PostgreSQL accepts, and return the refused ones. All rows must have ids."""
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
                # If the connection is lost from here on, the commit may still have succeeded.
                self.in_doubt = True
        # Halve a batch that exceeds statement_timeout. A single event that exceeds it is retried, not refused.
        except (InvalidArgument, psycopg.errors.QueryCanceled) as error:
            if len(rows) == 1:
                if isinstance(error, psycopg.errors.QueryCanceled):
                    raise
                return [RefusedEvent(rows[0], error)]
            half = len(rows) // 2
            return self._commit(rows[:half], write) + self._commit(rows[half:], write)
        return []
