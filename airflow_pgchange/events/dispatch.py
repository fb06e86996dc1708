"""Dispatching: match published events with the subscriptions of groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.connections import read_committed
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import rows

WITHIN = 60.0
"""Timeout of one chunk in seconds. A chunk that takes longer has a condition that is too slow or never ends."""
LONGEST_STATEMENT = timedelta(days=24)
"""Maximum timeout: PostgreSQL stores ``statement_timeout`` as a 32-bit integer of milliseconds."""


@dataclass(frozen=True)
class Dispatched:
    """The result of one chunk.

    ``events``: how many were checked. ``pairs``: how many matches of an event and a subscription were stored. ``more``:
    whether more events wait.
    """

    events: int
    pairs: int
    more: bool


def dispatch(connection: psycopg.Connection[Any], timeout: Seconds = WITHIN) -> Dispatched:
    """Dispatch the next chunk in its own transaction. Does nothing while another session dispatches.

    Raises DispatchEnded after ``timeout``. The error names the condition that was running, if there was one.
    """
    limit = sql.SQL("set local statement_timeout = {}").format(
        max(1, round(1000 * seconds("timeout", timeout, most=LONGEST_STATEMENT)))
    )
    with translated(), read_committed(connection):
        connection.execute(limit)
        [chunk] = rows(connection, "select events, pairs, more from pgmb.dispatch()")
    return Dispatched(*chunk)
