"""A worker of tubes that keeps mirrors, or a backfill, as a process that a test kills.

A worker records each batch in the table ``work`` over another connection. ``began`` and ``ended`` are numbers of a
sequence, both drawn while it holds the worker's lock.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

from airflow_pgchange import tubes
from airflow_pgchange.errors import ConsumerBusy, Refused, StaleClaim
from airflow_pgchange.feeds import Change, ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.keys import Key
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.results.attached_tables import Attached
from tests.chaos.harness import ConsumerFailed, harmed
from tests.chaos.shapes import SHAPES, numbers

Connection = psycopg.Connection[Any]
TABLES = ("sh0001.item", "sh0002.item", "sh0002.part", "sh0003.item", "sh0004.item")
MOVED = "sh0002.part"
TUBES = {"every": "true", "opened": "state = 'open'"}
"""The tubes, each with its predicate."""
PAUSE = 0.02
"""The pause in seconds of a worker that has found nothing, and of a backfill between two chunks."""


def attached_to(tube: str) -> list[str]:
    """Return the tables that are attached to a tube."""
    return [table for table in TABLES if tube == "every" or table != MOVED]


@dataclass(frozen=True)
class Worker:
    """The arguments of a worker's process.

    ``fault`` is empty, ``unlocked``, ``by seq alone``, or a fault of ``harmed``. ``shape`` is the shape of the tables'
    keys.
    """

    source: str
    results: str
    number: int
    seed: str
    failures: float = 0.1
    fault: str = ""
    shape: str = "bigint"


class Unlocked(TubeFeed):
    """The planted fault: a feed that takes no lock."""

    def lock(self) -> sql.Composed:
        return sql.SQL("select {}").format(True)


Also = Callable[[Connection, TubeFeed, Sequence[Change]], None]
"""Writes in addition to those of the mirror, in the transaction of the batch."""


def replay(worker: Worker, feed: TubeFeed, log: Connection, chance: random.Random, also: Also) -> bool:
    """Bring the mirrors up to date for a batch. Return whether there was a batch."""
    with ConsumerTransaction(feed, worker.results, worker.source) as consumer:
        if consumer.busy or consumer.claim(chance.choice([1, 50, 500])) is None:
            return False
        changes = harmed(list(consumer.changes()), worker.fault)
        tables: dict[int, list[str]] = defaultdict(list)
        for each in Attached.all(feed.tube, ask(log, feed.attached())):
            tables[each.shard].append(each.table)
        shards = [change.data["shard"] for change in changes]
        ids = [numbers(worker.shape)[change.id] for change in changes]
        seqs = [None if change.data["backfill"] else int(change.position) for change in changes]
        row = log.execute(
            "insert into work (process, feed, workers, shards, ids, seqs, tables) "
            "values (%s, %s, %s, %s, %s, %s, %s) returning n",
            [os.getpid(), feed.tube, feed.workers, shards, ids, seqs, json.dumps(tables)],
        ).fetchone()
        assert row is not None
        touched = {
            (shard, id): int(change.position) for shard, id, change in zip(shards, ids, changes, strict=True)
        }
        time.sleep(chance.random() * 0.03)
        failed = chance.random() < worker.failures
        try:
            wanted = _wanted(log, feed.tube, tables, touched)
        except errors.DeadlockDetected:
            # A worker and writers that truncate tables can deadlock, and PostgreSQL may have cancelled this worker.
            failed = True
        if not failed:

            def write(connection: Connection) -> None:
                _store(connection, feed.tube, wanted)
                also(connection, feed, changes)

            consumer.ack(write)
        log.execute(
            "update work set ended = nextval('moment'), how = %s where n = %s and ended is null",
            ["failed" if failed else "acked", row[0]],
        )
        if failed:
            raise ConsumerFailed
    return True


Wanted = dict[str, dict[int, tuple[int, tuple[Any, ...] | None]]]
"""By table: the touched ids, each with its seq and its row. The row is None if the mirror must not have it."""


def _wanted(
    source: Connection, tube: str, tables: dict[int, list[str]], touched: dict[tuple[int, int], int]
) -> Wanted:
    wanted: Wanted = {}
    for shard, names in tables.items():
        for table in names:
            seqs = {id: seq for (its_shard, id), seq in touched.items() if its_shard == shard}
            rows = source.execute(
                f"select id, state, word, rank from {table} where id = any (%s) and {TUBES[tube]}",
                [list(seqs)],
            ).fetchall()
            found = {row[0]: row for row in rows}
            wanted[table] = {id: (seq, found.get(id)) for id, seq in seqs.items()}
    return wanted


def _store(connection: Connection, tube: str, wanted: Wanted) -> None:
    """Delete rows that are gone, and upsert existing rows."""
    for table, touched in wanted.items():
        gone = [id for id, (_, row) in touched.items() if row is None]
        connection.execute(
            "delete from mirror where (tube, tbl) = (%s, %s) and id = any (%s)", [tube, table, gone]
        )
        there = [(tube, table, *row, seq) for seq, row in touched.values() if row is not None]
        with connection.cursor() as cursor:
            cursor.executemany(
                "insert into mirror values (%s, %s, %s, %s, %s, %s, %s) on conflict (tube, tbl, id) do update set "
                "state = excluded.state, word = excluded.word, rank = excluded.rank, seq = excluded.seq",
                there,
            )


def replay_by_seq_alone(worker: Worker, feed: TubeFeed, log: Connection) -> bool:
    """The planted fault: a naive worker that continues after the last seq it has seen."""
    at = log.execute(
        "select seq from naive_worker where (tube, worker) = (%s, %s)", [feed.tube, feed.worker]
    ).fetchone()
    pods = log.execute(
        f"select seq, shard, ids from {feed.tube} where mod(shard, %s) = %s and seq > %s order by seq limit 20",
        [feed.workers, feed.worker, at[0] if at else 0],
    ).fetchall()
    if not pods:
        return False
    shards = [shard for _, shard, ids in pods for _ in ids]
    ids = [id for _, _, ids in pods for id in ids]
    seqs = [seq for seq, _, ids in pods for _ in ids]
    tables = {shard: [table for table in TABLES if f"{shard:04}" in table] for shard in set(shards)}
    touched = {(shard, id): seq for shard, id, seq in zip(shards, ids, seqs, strict=True)}
    wanted = _wanted(log, feed.tube, tables, touched)
    with connect(worker.results) as results, results.transaction():
        _store(results, feed.tube, wanted)
    with log.transaction():
        log.execute(f"delete from {feed.tube} where seq = any (%s)", [[seq for seq, _, _ in pods]])
        log.execute(
            "insert into naive_worker values (%s, %s, %s) on conflict (tube, worker) do update set seq = excluded.seq",
            [feed.tube, feed.worker, pods[-1][0]],
        )
        log.execute(
            "insert into work (process, feed, workers, shards, ids, seqs, ended, how) "
            "values (%s, %s, %s, %s, %s, %s, nextval('moment'), 'acked')",
            [os.getpid(), feed.tube, feed.workers, shards, ids, seqs],
        )
    return True


def held(worker: Worker, feed: TubeFeed) -> tubes.Downstream:
    """Return the ids that a mirror may have to delete: those that it has not written since the start in the control
    pod."""

    def ids(control: tubes.Control) -> list[Key]:
        with connect(worker.results) as connection:
            rows = connection.execute(
                "select id from mirror where (tube, tbl) = (%s, %s) and seq < %s",
                [feed.tube, control.table, control.start_seq or control.seq],
            ).fetchall()
        return [SHAPES[worker.shape].key(row[0]) for row in rows]

    return ids


class Process:
    """A worker's process. It creates its feeds anew when the number of workers has changed."""

    def __init__(self, worker: Worker, also: Also = lambda *_: None) -> None:
        self.worker = worker
        self.also = also
        self.log = connect(worker.source)
        self.chance = random.Random(worker.seed)
        self.feeds = {tube: self.made(tube) for tube in TUBES}

    def made(self, tube: str) -> TubeFeed:
        """Return the feed of this process's worker. If there are fewer workers than processes, several processes share a
        worker."""
        workers = ask(self.log, sql.SQL("select partitions from tube.tube where name = {}").format(tube))
        kind = Unlocked if self.worker.fault == "unlocked" else TubeFeed
        return kind(tube, self.worker.number % workers, workers)

    def work(self, tube: str) -> bool:
        """Process one batch, or the control pods. Return whether there was a batch."""
        feed = self.feeds[tube]
        try:
            if self.worker.fault == "by seq alone":
                return replay_by_seq_alone(self.worker, feed, self.log)
            if replay(self.worker, feed, self.log, self.chance, self.also) and self.chance.random() < 0.8:
                return True
            done = tubes.work_off(feed, self.worker.source, held(self.worker, feed))
            for one in done:
                assert one.given_up is None, one
                self.tell(f"{one.control.type} {'with' if one.touched else 'without'} ids")
        except ConsumerFailed:
            return True
        except ConsumerBusy:
            self.tell("busy")
        except StaleClaim:
            self.tell("stale")
            self.feeds[tube] = self.made(tube)
        return False

    def tell(self, what: str) -> None:
        self.log.execute("insert into told values (%s)", [what])

    def run(self, stopped: Callable[[], bool]) -> None:
        while not stopped():
            found = [self.work(tube) for tube in TUBES]
            if not any(found):
                time.sleep(PAUSE)


@dataclass(frozen=True)
class Backfill:
    """The arguments of a backfill's process, which backfills every table of the tube."""

    source: str
    tube: str
    chunk_size: int

    def run(self) -> None:
        with connect(self.source) as connection:
            for table in attached_to(self.tube):
                while not self.backfill(connection, table):
                    time.sleep(PAUSE)

    def backfill(self, connection: Connection, table: str) -> bool:
        """Return False if the backfill must begin anew: it ends when its table changes its shard."""
        try:
            return tubes.backfill(
                connection, self.tube, table, "rank", chunk_size=self.chunk_size, pause=PAUSE
            ).finished
        except Refused as error:
            connection.execute("insert into told values (%s)", [f"refused: {error}"])
            return False


def command(what: Worker | Backfill) -> list[str]:
    """Return the command that starts a process."""
    kind = type(what).__name__
    return [sys.executable, "-m", "tests.chaos.mirror_worker", json.dumps({"kind": kind, **asdict(what)})]


def main() -> None:
    given = json.loads(sys.argv[1])
    if given.pop("kind") == "Backfill":
        Backfill(**given).run()
        return
    parent, asked = os.getppid(), []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    Process(Worker(**given)).run(lambda: bool(asked) or os.getppid() != parent)


if __name__ == "__main__":
    main()
