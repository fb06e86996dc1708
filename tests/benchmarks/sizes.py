"""Bytes of a change in each feed, beside the written row itself, and the server's CPU to write and to consume it.

docs/how-to/sizing.md has a table of the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TubeFeed
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.feed import Feed
from tests.benchmarks.measure import Report, section
from tests.benchmarks.one import acked, server_cpu

CHANGES, BATCH = 50_000, 10_000
SIZES = (1, 100)
"""The numbers of changes in a transaction."""
PREPARED = (
    "set synchronous_commit = off",
    "create table tracked (id bigint generated always as identity primary key)",
    "select revision.track('tracked')",
    "create table tubed_1 (id bigint generated always as identity primary key)",
    "create schema pods",
    "set search_path = pods",
    "select tube.tube_ensure_exists('sized')",
    "reset search_path",
    "select tube.tube_table_ensure_attached('sized', 'tubed_1')",
    "create table bare (id bigint generated always as identity primary key)",
    "select mbus.create_queue('sized', 16)",
    "insert into pgmb.subscriptions (group_id) values ('sized')",
)
FEEDS: dict[str, Feed] = {
    "commit queue": CommitFeed("sized", 0),
    "tube": TubeFeed("sized", 0),
    "event of 100 bytes": EventFeed("sized"),
    "message of 100 bytes": QueueFeed("sized"),
}
WRITES = {
    "the bare row": ("public", "insert into bare select from generate_series(1, {})"),
    "commit queue": ("revision", "insert into tracked select from generate_series(1, {})"),
    "tube": ("pods", "insert into tubed_1 select from generate_series(1, {})"),
    "event of 100 bytes": (
        "pgmb",
        "insert into pgmb.events (topic, payload) "
        "select 'sized', jsonb_build_object('note', repeat('x', 87)) from generate_series(1, {})",
    ),
    "message of 100 bytes": (
        "mbus",
        "perform mbus.post_sized(('note=>' || repeat('x', 94))::hstore) from generate_series(1, {})",
    ),
}
"""By name: the schema of a feed, and the statement that writes a given number of changes."""
SIZE = """
select sum(pg_relation_size(oid)) filter (where relkind in ('r', 't')),
       sum(pg_relation_size(oid)) filter (where relkind = 'i'), pg_current_wal_insert_lsn() - '0/0'
from pg_class
where relnamespace = %s::regnamespace
"""


@dataclass(frozen=True)
class Size:
    """Bytes of tables, of their indexes, and of the WAL since the server was created."""

    heap: int
    index: int
    wal: int


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in PREPARED:
            connection.execute(statement)
        for size in SIZES:
            with section(f"a change, {size} in a transaction"):
                for name, (schema, write) in WRITES.items():
                    _measure(connection, report, name, schema, write, size)
            with section(f"consuming a change, {BATCH:,} a batch, of {size} in a transaction"):
                for name, feed in FEEDS.items():
                    _consume(connection, conninfo, report, name, feed)


def _measure(
    connection: psycopg.Connection, report: Report, name: str, schema: str, write: str, size: int
) -> None:
    connection.execute("checkpoint")
    before, cpu = _size(connection, schema), server_cpu(connection)
    connection.execute(
        f"do $$ begin for _ in 1..{CHANGES // size} loop {write.format(size)}; commit; end loop; end $$"
    )
    cpu, after = server_cpu(connection) - cpu, _size(connection, schema)
    for part in ("heap", "index", "wal"):
        report.say(f"{name}, {part}", (getattr(after, part) - getattr(before, part)) / CHANGES, "bytes")
    report.say(f"{name}, CPU", cpu / CHANGES * 1e6, "us")


def _consume(connection: psycopg.Connection, conninfo: str, report: Report, name: str, feed: Feed) -> None:
    before = server_cpu(connection)
    drain(Plan(feed, conninfo, limit=BATCH, max_batches=None), acked)
    report.say(f"{name}, CPU", (server_cpu(connection) - before) / CHANGES * 1e6, "us")


def _size(connection: psycopg.Connection, schema: str) -> Size:
    row = connection.execute(SIZE, [schema]).fetchone()
    assert row is not None
    return Size(*map(int, row))
