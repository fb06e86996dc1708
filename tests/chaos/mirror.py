"""Mirrors of tables attached to tubes: the kills, the concurrent changes, and the check of the mirrors."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from airflow_pgchange import tubes
from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.keys import text
from airflow_pgchange.feeds.retries import past_deadlocks
from tests.chaos.crew import WORK
from tests.chaos.harness import one
from tests.chaos.kills import until
from tests.chaos.mirror_worker import MOVED, TABLES, TUBES, attached_to
from tests.chaos.shapes import SHAPES, parts

Connection = psycopg.Connection[Any]
ROWS = 400
"""Rows of each table that were written before the tubes were created."""
GHOSTS = range(5001, 5006)
"""Ids that at first only the mirrors have. A backfill or a truncate must delete them."""
LATE, LATE_MOVED = 9901, 9902
"""The id that a transaction touches which commits late, and the id in a table that moves before its pods are processed.

Nothing else touches these ids.
"""

SOURCE = """
create table told (what text);
create table naive_worker (tube text, worker integer, seq bigint, primary key (tube, worker));
"""
RESULTS = """
create table mirror (
    tube text, tbl text, id bigint, state text, word text, rank integer, seq bigint not null, primary key (tube, tbl, id)
)
"""


def set_up(source: str, results: str, workers: int, shape: str = "bigint") -> None:
    """Create tables whose rows are in no pod, tubes, and mirrors that have only rows that the tables lack."""
    with connect(source) as connection:
        connection.execute(WORK + SOURCE)
        for shard in range(1, 5):
            connection.execute(f"create schema sh{shard:04}")
        for table in TABLES:
            connection.execute(
                f"create table {table} (id bigint not null, state text not null, word text, rank integer, "
                f"{SHAPES[shape].columns}; {parts(shape, table)}"
                f"create index on {table} (rank, id);"
                f"insert into {table} select n, 'open', 'old', nullif(n % 7, 0) from generate_series(1, {ROWS}) as n"
            )
        for tube, wanted in TUBES.items():
            tubes.ensure(
                connection, tube, workers, wanted if wanted != "true" else None, key=SHAPES[shape].types
            )
            for table in attached_to(tube):
                tubes.attach(connection, tube, table)
    with connect(results) as connection:
        connection.execute(RESULTS)
        for tube in TUBES:
            for table in attached_to(tube):
                connection.execute(
                    "insert into mirror select %s, %s, unnest(%s::bigint[]), 'open', 'ghost', 0, 0",
                    [tube, table, list(GHOSTS)],
                )


def change_workers(source: str, workers: int) -> None:
    """Change the number of workers of all tubes. Repeat the call while the pods are locked by writers."""
    for tube in TUBES:
        changed = False
        while not changed:
            with connect(source) as connection, suppress(ConsumerBusy):
                tubes.ensure(connection, tube, workers)
                changed = True
    until(lambda: one(source, AT_WORK_UNDER, workers) == len(TUBES), f"batches under {workers} workers")


def commit_late(source: str, shard: int, shape: str = "bigint") -> None:
    """Run a transaction that commits after pods with a higher seq than its own have been processed."""
    with psycopg.connect(source) as connection:
        connection.execute(f"insert into sh{shard:04}.item values ({LATE}, 'open', 'late', null)")
        for tube in TUBES:
            seq = connection.execute(
                f"select seq from {tube} where %s = any (ids::text[])", [text(SHAPES[shape].key(LATE))]
            ).fetchone()
            until(partial(one, source, PASSED, tube, shard, *(seq or ())), "a higher seq to be done")


def move(source: str, old: int, new: int, shape: str = "bigint") -> None:
    """Attach a table under another shard while its pods under the old shard are not processed.

    These are pods of rows and of a truncation. Repeat the call while writers lock the table.
    """
    moved = False
    while not moved:
        with suppress(ConsumerBusy):
            past_deadlocks(partial(_move, source, old, new, shape))
            moved = True


def _move(source: str, old: int, new: int, shape: str) -> None:
    with connect(source) as mover, connect(source) as writer, mover.transaction():
        mover.execute("select tube.hold_still('every')")
        writer.execute(f"truncate {MOVED}")
        writer.execute(f"insert into {MOVED} values ({LATE_MOVED}, 'open', 'moved', null)")
        tubes.attach(mover, "every", MOVED, shard=new)
        assert one(
            source,
            "select count(*) from every where shard = %s and %s = any (ids::text[])",
            old,
            text(SHAPES[shape].key(LATE_MOVED)),
        )


@dataclass(frozen=True)
class Verdict:
    """The errors at the end, when no pod is left to process.

    They are rows in which mirror and source differ, remaining pods, ids that were in two batches at once, and batches
    without an end.
    """

    differing: frozenset[tuple[Any, ...]]
    pods: int
    overlaps: int
    unended: int


RIGHT = Verdict(frozenset(), 0, 0, 0)
AT_WORK_UNDER = "select count(distinct feed) from work where how = 'acked' and workers = %s"
PASSED = """
select exists (
    select from work cross join unnest(shards, seqs) as w(shard, seq)
    where how = 'acked' and feed = %s and w.shard = %s and w.seq > %s)
"""
OVERLAPS = """
select count(*) from (
    select w.began, max(w.ended) over (partition by w.feed, {key} order by w.began rows between unbounded preceding and
        1 preceding) as before
    from (select work.*, t.shard, t.id from work cross join unnest(shards, ids) as t(shard, id)) as w {join}
) as w where w.began < w.before
"""
BY_SHARD = OVERLAPS.format(key="w.shard, w.id", join="")
BY_TABLE = OVERLAPS.format(
    key="t.name, w.id", join="cross join jsonb_array_elements_text(w.tables -> w.shard::text) as t(name)"
)


def pods_left(source: str) -> int:
    return sum(one(source, f"select count(*) from {tube}") for tube in TUBES)


def judge(source: str, results: str) -> Verdict:
    rows = set()
    with psycopg.connect(source) as connection:
        for tube, wanted in TUBES.items():
            for table in attached_to(tube):
                query = f"select '{tube}', '{table}', id, state, word, rank from {table} where {wanted}"
                rows |= set(connection.execute(query).fetchall())
    with psycopg.connect(results) as connection:
        mirrored = set(connection.execute("select tube, tbl, id, state, word, rank from mirror").fetchall())
    return Verdict(
        frozenset(rows ^ mirrored),
        pods_left(source),
        one(source, BY_SHARD) + one(source, BY_TABLE),
        one(source, "select count(*) from work where ended is null"),
    )
