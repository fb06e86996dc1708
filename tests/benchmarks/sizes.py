"""Bytes of a change in each feed, beside the written row itself: heap, indexes and WAL. docs/performance has a table."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from tests.benchmarks.measure import Report, section

CHANGES = 50_000
SIZES = (1, 100)
"""Changes in a transaction."""
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
)
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
"""The schema of each feed, and the statement that writes so many changes."""
SIZE = """
select sum(pg_relation_size(oid)) filter (where relkind in ('r', 't')),
       sum(pg_relation_size(oid)) filter (where relkind = 'i'), pg_current_wal_insert_lsn() - '0/0'
from pg_class
where relnamespace = %s::regnamespace
"""


@dataclass(frozen=True)
class Size:
    """Bytes: of tables, of their indexes, and of WAL since the server was made."""

    heap: int
    index: int
    wal: int


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for statement in PREPARED:
            connection.execute(statement)
        for size in SIZES:
            with section(f"bytes a change, {size} in a transaction"):
                for name, (schema, write) in WRITES.items():
                    _measure(connection, report, name, schema, write, size)


def _measure(
    connection: psycopg.Connection, report: Report, name: str, schema: str, write: str, size: int
) -> None:
    connection.execute("checkpoint")
    before = _size(connection, schema)
    connection.execute(
        f"do $$ begin for _ in 1..{CHANGES // size} loop {write.format(size)}; commit; end loop; end $$"
    )
    after = _size(connection, schema)
    for part in ("heap", "index", "wal"):
        report.say(f"{name}, {part}", (getattr(after, part) - getattr(before, part)) / CHANGES, "bytes")


def _size(connection: psycopg.Connection, schema: str) -> Size:
    row = connection.execute(SIZE, [schema]).fetchone()
    assert row is not None
    return Size(*map(int, row))
