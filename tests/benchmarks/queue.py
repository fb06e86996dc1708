"""Claim and lag over queues of any length, and above an open transaction: CPU of the backend."""

from __future__ import annotations

import statistics

import psycopg
from psycopg.types.json import Jsonb

from tests.benchmarks.measure import Report, cpu_of, section
from tests.tubes import one

SIZES = (10_000, 1_000_000, 10_000_000)
LAG, CLAIM = 1000, 200


def fill(connection: psycopg.Connection, commits: int) -> None:
    """Fill the queue with commits.

    Their transactions are large enough that all ids are below the current transaction id.
    """
    connection.execute("truncate revision.commit_queue")
    connection.execute(
        "insert into revision.commit_queue (commit_id, branch_id, txid) "
        "select g, 0, (3 + g * (pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 10) / %s)::text::xid8 "
        "from generate_series(1::bigint, %s) as g",
        [commits, commits],
    )
    connection.execute("vacuum analyze revision.commit_queue")


def lag_cpu(connection: psycopg.Connection, position: dict[str, object], in_order: bool = False) -> float:
    """Return the milliseconds of CPU for the lag, as the mean of 1,000 calls."""
    query = "select pubsub.lag(0, %s, 1, %s)"
    arguments = [Jsonb(position), in_order]
    connection.execute(query, arguments)
    return cpu_of(connection, lambda: [connection.execute(query, arguments) for _ in range(LAG)]) / LAG * 1000


def claim_cpu(connection: psycopg.Connection, position: dict[str, object], limit: int) -> float:
    """Return the milliseconds of CPU for choosing a batch, as the mean of 200 calls."""
    query = "select pubsub.choose(0, %s, %s, false)"
    arguments = [Jsonb(position), limit]
    connection.execute(query, arguments)
    return (
        cpu_of(connection, lambda: [connection.execute(query, arguments) for _ in range(CLAIM)])
        / CLAIM
        * 1000
    )


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for _ in range(20_000):
            connection.execute("select pg_current_xact_id()")
        with section("claim of 1,000 and lag by commits queued, ms of CPU"):
            lags, claims = [], []
            for size in SIZES:
                fill(connection, size)
                lags.append(statistics.median(lag_cpu(connection, {}) for _ in range(3)))
                claims.append(statistics.median(claim_cpu(connection, {}, 1000) for _ in range(3)))
                report.say(f"lag, {size:,} queued", lags[-1], "ms", most=1.0)
                report.say(f"claim, {size:,} queued", claims[-1], "ms")
            report.say("lag, largest / smallest", lags[-1] / lags[0], "x", most=1.2)
            report.say("claim, largest / smallest", claims[-1] / claims[0], "x", most=1.2)
        with section("100,000 commits out of order above an open transaction, against none open"):
            disturbed(connection, conninfo, report)


def disturbed(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    connection.execute("truncate revision.commit_queue")
    with psycopg.connect(conninfo) as slow:
        slow.execute("insert into revision.commit default values")
        for _ in range(20_000):
            connection.execute("insert into revision.commit select from generate_series(1, 5)")
        above = {"snapshot": one(connection, "select pg_current_snapshot()::text")}
        with_open = [(lag_cpu(connection, above), claim_cpu(connection, above, 1000)) for _ in range(3)]
    settled = {"snapshot": one(connection, "select pg_current_snapshot()::text")}
    without = [(lag_cpu(connection, settled), claim_cpu(connection, settled, 1000)) for _ in range(3)]
    for number, name in enumerate(("lag, nothing new", "claim, nothing new")):
        ours, base = (statistics.median(pair[number] for pair in rows) for rows in (with_open, without))
        report.say(f"{name}, ms of CPU", ours, "ms")
        report.say(f"{name}, disturbed / undisturbed", ours / base, "x", most=1.5)
