"""With the statistics of empty tables, which a burst finds before the next ANALYZE, no plan reads a whole table for each
change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests import bursts, tubes
from tests.waiting import until

Connection = psycopg.Connection[Any]

MANY = 1000
EACH = 100
"""The maximum number of rows that an operation may read for each change.

A plan that reads a whole table reads 500 to 1,000.
"""


def dear(connection: Connection, deeds: Iterator[bursts.Deed]) -> dict[str, float]:
    """Return the operations that read more than ``EACH`` rows for each change, with the number of rows."""
    found = {}
    for name, do in deeds:
        bursts.forget(connection)
        before = so_far(connection)
        do()
        found[name] = (so_far(connection) - before) / MANY
    return {name: each for name, each in found.items() if each > EACH}


def so_far(connection: Connection) -> int:
    # A session reports its reads before it ends.
    until(connection, "select count(*) = 1 from pg_stat_activity where datname = current_database()")
    connection.execute("select pg_stat_force_next_flush()")
    query = "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_user_tables"
    return int(tubes.one(connection, query))


@pytest.mark.parametrize("burst", [bursts.of_commits, bursts.of_tubes, bursts.of_events])
def test_operations_of_feeds_read_few_rows_with_outdated_statistics(
    burst: Callable[..., Iterator[bursts.Deed]], connection: Connection, db: str
) -> None:
    assert dear(connection, burst(connection, db, MANY)) == {}


@pytest.mark.hstore
@pytest.mark.parametrize("burst", [bursts.of_queues, bursts.of_queues_out_of_order])
def test_operations_of_queues_read_few_rows_with_outdated_statistics(
    burst: Callable[..., Iterator[bursts.Deed]], connection: Connection, db: str
) -> None:
    assert dear(connection, burst(connection, db, MANY)) == {}
