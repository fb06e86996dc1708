"""A table of flights, and statements that each write a given number of its rows, for measurements of captures."""

from __future__ import annotations

from functools import partial

import psycopg

from tests.benchmarks.measure import Cost, cost_of

FLIGHT = (
    "id bigint primary key, year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, "
    "sched_arr_time int, arr_delay int, carrier text, flight int, tailnum text, origin text, dest text, air_time int, "
    "distance int, hour int, minute int, time_hour timestamptz"
)
"""The columns of the flights that the demo replays."""
ROWS = (
    "insert into {} select g, 2013, 1, 1, 517, 515, 2, 830, 819, 11, 'UA', 1545, 'N14228', 'EWR', 'IAH', 227, 1400, "
    "5, 15, '2013-01-01 05:00-05' from generate_series({}, {}) as g"
)

WARMING = 20
"""Statements that run before the measurement, because a session forgets its plans when a table is emptied."""


def written(
    connection: psycopg.Connection, op: str, rows: int, statements: int, table: str, *, emptied: str
) -> Cost:
    """Return the cost of this number of statements on a table.

    ``emptied`` is a table with what was captured of earlier statements. It is emptied first.
    """
    connection.execute(f"truncate {table}")
    connection.execute(f"truncate {emptied}")
    if op != "insert":
        connection.execute("set session_replication_role = replica")
        connection.execute(ROWS.format(table, 1, rows * (WARMING + statements)))
        connection.execute("reset session_replication_role")
        connection.execute(f"vacuum analyze {table}")

    def work(begin: int, end: int) -> None:
        for n in range(begin, end):
            first, last = n * rows + 1, (n + 1) * rows
            if op == "insert":
                connection.execute(ROWS.format(table, first, last))
            elif op == "update":
                connection.execute(
                    f"update {table} set arr_delay = arr_delay + 1 where id between {first} and {last}"
                )
            else:
                connection.execute(f"delete from {table} where id between {first} and {last}")

    work(0, WARMING)
    return cost_of(connection, partial(work, WARMING, WARMING + statements))
