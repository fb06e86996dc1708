"""Dispatching: what was published goes to the groups that subscribe to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.checks import Seconds, seconds
from airflow_pgchange.feeds.connections import read_committed
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import rows

WITHIN = 60.0
"""Seconds that a chunk of events may take: with one more a condition is too slow, or does not end."""
LONGEST_STATEMENT = timedelta(days=24)
"""PostgreSQL counts the milliseconds in an integer."""


@dataclass(frozen=True)
class Dispatched:
    """A chunk: ``events`` were looked at, which went to a subscription ``pairs`` times; ``more`` wait."""

    events: int
    pairs: int
    more: bool


def dispatch(connection: psycopg.Connection[Any], timeout: Seconds = WITHIN) -> Dispatched:
    """Dispatch the next chunk, in a transaction of its own; nothing while somebody else dispatches.

    Raises DispatchEnded where it takes longer than ``timeout``, and names the condition that it was at, or says that
    it was at none.
    """
    limit = sql.SQL("set local statement_timeout = {}").format(
        max(1, round(1000 * seconds("timeout", timeout, most=LONGEST_STATEMENT)))
    )
    with translated(), read_committed(connection):
        connection.execute(limit)
        [chunk] = rows(connection, "select events, pairs, more from pgmb.dispatch()")
    return Dispatched(*chunk)
