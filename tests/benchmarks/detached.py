"""A batch that is claimed with a lease in one transaction, and read and acked in another, beside the classic way.

Both ways run with open sessions, as in a drain, which shows the cost of a claim and an ack. They also run with new
sessions, which shows the cost of the second transaction's connections.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from airflow_pgchange.detached import Handle
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.sessions import Sessions
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall

FEED = CommitFeed("detached", 0)
MOST = 1.3
"""The maximum time of a detached batch, as a multiple of the time of the classic way."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create table copy (id bigint)")
        for changes, rounds in ((1, 21), (100_000, 5)):
            for of_sessions, most in (("kept", MOST), ("new", None)):
                with section(f"{changes:,} commits, claimed, read, copied and acked, {of_sessions} sessions"):
                    compare(connection, conninfo, report, changes, rounds, most)


def compare(
    connection: psycopg.Connection[Any],
    conninfo: str,
    report: Report,
    changes: int,
    rounds: int,
    most: float | None,
) -> None:
    with Sessions() as sessions:
        kept = sessions if most is not None else None
        timed = partial(time_of, connection, changes)
        ours, theirs = side_by_side(
            rounds,
            partial(timed, partial(apart, conninfo, kept)),
            partial(timed, partial(classic, conninfo, kept)),
        )
    for name, each in (("detached", ours), ("classic", theirs)):
        report.say(f"time, {name}", 1000 * statistics.median(each), "ms")
    report.say("ratio of the times", ratio(ours, theirs), "x", most=most)


def time_of(connection: psycopg.Connection[Any], changes: int, work: Callable[[], None]) -> float:
    connection.execute("truncate copy")
    connection.execute("insert into revision.commit select from generate_series(1, %s)", [changes])
    waited = wall(work)
    assert connection.execute("select count(*) from copy").fetchone() == (changes,)
    return waited


def write(connection: psycopg.Connection[Any], ids: list[Any]) -> None:
    with connection.cursor().copy("copy copy (id) from stdin") as out:
        for each in ids:
            out.write_row((each,))


def classic(conninfo: str, kept: Sessions | None) -> None:
    with ConsumerTransaction(FEED, conninfo, sessions=kept) as transaction:
        transaction.claim(1_000_000)
        ids = [change.id for change in transaction.changes()]
        transaction.ack(lambda connection: write(connection, ids))


def apart(conninfo: str, kept: Sessions | None) -> None:
    with ConsumerTransaction(FEED, conninfo, sessions=kept) as transaction:
        batch = transaction.claim(1_000_000, lease=600)
        assert batch is not None
        token = Handle.of(FEED, batch, 600).token
    with ConsumerTransaction(FEED, conninfo, sessions=kept) as transaction:
        transaction.resume(token)
        ids = [change.id for change in transaction.changes()]
        transaction.ack(lambda connection: write(connection, ids))
