"""A load on all feeds at once, at a given rate, beside ``airflow-pgchange maintain --every`` and nobody else.

Writers commit one row, event or message in each transaction. One consumer of each feed follows. Another one of each feed
that keeps history sleeps for the first half, and then drains its backlog.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TubeFeed
from airflow_pgchange.feeds.feed import Feed
from demo.postgres import Cluster, embedded_binaries
from tests import queues, tubes
from tests.chaos.harness import consume_once
from tests.chaos.kills import until
from tests.events import subscribe

ASLEEP = "asleep"
"""The name of each consumer that sleeps."""
BATCH = 10_000
SETTINGS = {"autovacuum": "on", "autovacuum_naptime": "5s", "log_line_prefix": "'%a: '"}
WRITER, MAINTENANCE = "writer", "maintenance"
"""The names of sessions in the server's log."""
WAIT = 2.0
"""Seconds that a writer may wait, on a machine that is busy."""
WRITES: Mapping[str, str] = {
    "commits": "insert into ledger default values",
    "tubes": "insert into item default values",
    "events": "insert into pgmb.events (topic, payload) values ('load', '{}')",
    "messages": "select mbus.post_orders('n=>1'::hstore)",
}
SHARES: Mapping[str, float] = {"commits": 0.4, "tubes": 0.2, "events": 0.2, "messages": 0.2}
"""The share of each feed in the transactions of all."""


@dataclass(frozen=True)
class Load:
    """The rate of a campaign, and its times in seconds.

    ``rate``: transactions a second of all writers; None is as many as they can. ``partition``: how long a partition
    lasts at ``paced`` transactions a second, which is the rate unless another is given.
    """

    rate: int | None
    seconds: float
    partition: float
    ahead: int
    every: float
    retention: float
    paced: int = 0
    feeds: tuple[str, ...] = tuple(WRITES)

    @property
    def width(self) -> int:
        return int((self.paced or self.rate or 0) * self.partition)

    @property
    def options(self) -> list[str]:
        given = {
            "every": self.every,
            "width": self.width,
            "ahead": self.ahead,
            "retention": f"{self.retention:g} s",
        }
        return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def feeds_of(load: Load, branch: int) -> tuple[dict[str, Feed], dict[str, Feed]]:
    """Return the feeds that are followed, and those of the consumers that sleep."""
    followed: dict[str, Feed] = {
        "commits": CommitFeed("awake", branch),
        "tubes": TubeFeed("copies"),
        "events": EventFeed("awake"),
        "messages": QueueFeed("orders"),
    }
    asleep: dict[str, Feed] = {
        "commits": CommitFeed(ASLEEP, branch),
        "events": EventFeed(ASLEEP),
        "messages": QueueFeed("orders", ASLEEP),
    }
    return (
        {kind: followed[kind] for kind in load.feeds},
        {k: f for k, f in asleep.items() if k in load.feeds},
    )


def set_up(db: str, load: Load) -> tuple[dict[str, Feed], dict[str, Feed]]:
    """Create the tables, feeds and consumers, and the first partitions with the widths of the load."""
    with psycopg.connect(db, autocommit=True) as connection:
        for table in ("ledger", "item"):
            connection.execute(f"create table {table} (id bigint generated always as identity primary key)")
        branch = queues.one(connection, "select revision.track('ledger')")
        tubes.make(connection, "copies")
        tubes.attach(connection, tube="copies")
        for group in ("awake", ASLEEP):
            subscribe(connection, group)
        if "messages" in load.feeds:
            connection.execute("create extension if not exists hstore")
            queues.make(connection, "orders")
            queues.consumer(connection, ASLEEP, queue="orders")
        connection.execute("select pubsub.register(%s, %s)", [ASLEEP, branch])
        _make_partitions(connection, load)
    return feeds_of(load, branch)


def _make_partitions(connection: psycopg.Connection[Any], load: Load) -> None:
    for table in ("revision.commit_queue", "pgmb.events", "pgmb.dispatched"):
        for (part,) in connection.execute(
            "select inhrelid::regclass::text from pg_inherits as i join pg_class as c on c.oid = i.inhrelid "
            "where inhparent = %s::regclass and pg_get_expr(relpartbound, c.oid) <> 'DEFAULT'",
            [table],
        ).fetchall():
            connection.execute(f"drop table {part}")
    width = round(load.partition)
    settings = {
        "partition_interval": width,
        "partition_retention_period": round(load.retention),
        "future_intervals_to_create": round(max(3 * load.every, load.ahead * load.partition)),
    }
    for name, value in settings.items():
        connection.execute("update pgmb.config set value = %s where id = %s", [f"{value} seconds", name])
    connection.execute("delete from revision.pace")
    # Maintenance has run before, while nobody wrote.
    connection.execute(
        "insert into revision.pace values (clock_timestamp() - interval '31 seconds', "
        "pg_snapshot_xmax(pg_current_snapshot())::text::bigint, %s, 0)",
        [load.every],
    )
    connection.execute("select revision.maintain_partitions(%s, %s)", [load.width, load.ahead])
    connection.execute("select pgmb.make_partitions('pgmb.dispatched')")
    connection.execute("select pgmb.make_partitions('pgmb.events')")


class Writers:
    """A pgbench for each feed. ``written`` is the number of transactions of each, once they have ended.

    The server's log has each statement that took longer than ``WAIT``. The lag that pgbench reports would add up, on a
    machine that is too slow for the rate.
    """

    def __init__(self, cluster: Cluster, folder: Path, load: Load) -> None:
        self.written: dict[str, int] = {}
        self._running: dict[str, subprocess.Popen[str]] = {}
        share = sum(SHARES[kind] for kind in load.feeds)
        for kind in load.feeds:
            script = folder / f"{kind}.sql"
            script.write_text(WRITES[kind] + ";\n")
            rate = [] if load.rate is None else ["-R", f"{load.rate * SHARES[kind] / share:g}"]
            self._running[kind] = subprocess.Popen(
                [
                    embedded_binaries() / "pgbench",
                    *("-n", "-c", "2", "-M", "prepared", "-T", f"{load.seconds:g}", *rate, "-f", script),
                    cluster.conninfo(),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=logging(WRITER, WAIT),
            )

    def wait(self) -> None:
        """Wait for all writers. Raises AssertionError if a transaction failed."""
        for kind, process in self._running.items():
            told = process.communicate()[0]
            assert process.returncode == 0, told
            self.written[kind] = self.written.get(kind, 0) + int(_number(r"actually processed: (\d+)", told))
            assert _number(r"failed transactions: (\d+)", told) == 0, told

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def logging(name: str, least: float) -> dict[str, str]:
    """Return the environment of a process whose statements the server logs if they take at least these seconds."""
    return os.environ | {"PGAPPNAME": name, "PGOPTIONS": f"-c log_min_duration_statement={least * 1000:.0f}"}


def _number(pattern: str, told: str) -> float:
    found = re.search(pattern, told)
    return float(found[1]) if found else 0.0


@dataclass
class Consumers:
    """A thread for each feed that processes whatever is ready. ``processed`` counts the changes of each."""

    db: str
    processed: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, feeds: Mapping[str, Feed], name: Callable[[str], str] = str) -> None:
        for kind, feed in feeds.items():
            thread = threading.Thread(target=self._follow, args=(feed, name(kind)))
            self._threads.append(thread)
            thread.start()

    def _follow(self, feed: Feed, name: str) -> None:
        try:
            while not self.stopping.is_set():
                done = consume_once(feed, self.db, self.db, BATCH, keep=lambda connection, changes: None)
                self.processed[name] += done
                if done < BATCH:
                    self.stopping.wait(0.5)
        except (PgChangeError, psycopg.Error) as error:
            self.errors.append(error)

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def maintenance(db: str, load: Load, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The real command, as a process, from the end of its first run on. The server's log has each of its statements with
    their durations."""
    program = Path(sys.executable).with_name("airflow-pgchange")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "maintain", "--dsn", db, *load.options],
            stderr=output,
            stdout=output,
            env=logging(MAINTENANCE, 0),
        )
        try:
            until(lambda: "maintained in" in log.read_text(), "the first run of maintenance")
            yield process
            assert process.poll() is None, log.read_text()[-4000:]
        finally:
            process.terminate()
            process.wait()


def wait_until_read(db: str, written: Mapping[str, int], consumers: Consumers, patience: float) -> None:
    """Wait until each consumer has processed as many changes as were written, or ``patience`` seconds have passed."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not consumers.errors:
        if all(consumers.processed[name] >= written[name.split()[-1]] for name in consumers.processed):
            break
        time.sleep(0.2)
