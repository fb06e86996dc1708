"""The cost of a burst four times as large, with old and with new statistics: four times as much, and not sixteen
times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import psycopg
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin import schema
from tests import bursts
from tests.benchmarks.measure import Report, section, wall

FEW = 2000
TIMES = 4
SHORT = 0.02
"""The minimum duration of a measurement in seconds.

In a shorter one, fixed costs would hide the cost of the changes.
"""


BURSTS = (
    bursts.of_commits,
    bursts.of_tubes,
    bursts.of_events,
    bursts.of_queues,
    bursts.of_queues_out_of_order,
)


def run(conninfo: str, report: Report) -> None:
    for burst, statistics in itertools.product(BURSTS, (bursts.forget, bursts.learn)):
        name = burst.__name__.replace("_", " ")
        with section(f"{name}, statistics by {statistics.__name__}: {FEW * TIMES} changes against {FEW}"):
            few = seconds(conninfo, burst, statistics, FEW)
            for name, many in seconds(conninfo, burst, statistics, FEW * TIMES).items():
                report.say(name, many * 1e6 / FEW / TIMES, "us a change")
                if many > SHORT:
                    report.say(f"growth of {name}", many / few[name], "x", most=TIMES**1.5)


def seconds(
    conninfo: str,
    burst: Callable[..., Iterator[bursts.Deed]],
    statistics: Callable[[psycopg.Connection], None],
    n: int,
) -> dict[str, float]:
    """Return the time of each operation, in a new database."""
    with psycopg.connect(conninfo, autocommit=True) as server:
        server.execute("create database burst")
        db = make_conninfo(conninfo, dbname="burst")
        with psycopg.connect(db, autocommit=True) as connection:
            schema.install(connection)
            found = {}
            for name, do in burst(connection, db, n):
                statistics(connection)
                found[name] = wall(do)
        server.execute("drop database burst")
    return found
