"""A consumer of the event log's groups, as a process that a test kills.

It processes one batch of each group in turn. The results are rows of ``effect``, written in the consumer transaction.
Each batch is recorded in ``work`` over another connection.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psycopg

from airflow_pgchange.errors import ConnectionLost, ServerUnavailable
from airflow_pgchange.feeds import Change, EventFeed
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.feed import Feed
from tests.chaos.crew import end_work
from tests.chaos.harness import ConsumerFailed, consume_once

Connection = psycopg.Connection[Any]
PAUSE = 0.02
"""The pause in seconds of a consumer that has found no events or no server."""


@dataclass(frozen=True)
class Consumer:
    """The arguments of a consumer's process. ``fault`` is empty, or ``by id alone``."""

    source: str
    results: str
    groups: Sequence[str]
    seed: str
    failures: float = 0.1
    fault: str = ""


class Failing(Protocol):
    """The databases of a consumer, and the share of its batches that fail on purpose."""

    @property
    def source(self) -> str: ...
    @property
    def results(self) -> str: ...
    @property
    def failures(self) -> float: ...


def cut_off(error: psycopg.Error) -> bool:
    """Whether an error means that the server is gone or not back yet. Any other error is a fault of this package."""
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))


def through_faults(
    work: Callable[[], None], stopped: Callable[[], bool], also: tuple[type[Exception], ...] = ()
) -> None:
    """Call ``work`` until it succeeds, although the server may be gone.

    ``also`` are other errors after which to call it again.
    """
    while not stopped():
        try:
            work()
        except (ServerUnavailable, ConnectionLost, *also):
            time.sleep(PAUSE)
        except psycopg.OperationalError as error:
            if not cut_off(error):
                raise
            time.sleep(PAUSE)


def keep(group: str) -> Callable[[Connection, Sequence[Change]], None]:
    """Return the function that writes the results of a batch of a group."""

    def write(connection: Connection, changes: Sequence[Change]) -> None:
        ids, positions = [change.id for change in changes], [change.position for change in changes]
        connection.execute(
            "insert into effect (group_id, event_id, position) select %s, e.id, e.position "
            "from unnest(%s::text[], %s::text[]) with ordinality as e(id, position, n) order by e.n",
            [group, ids, positions],
        )

    return write


def read_by_id_alone(consumer: Consumer, group: str) -> int:
    """The planted fault: a naive consumer that continues after the highest id it has seen."""
    with connect(consumer.source) as connection, connection.transaction():
        connection.execute("select pgmb.poll_for_events()")
        connection.execute("select pg_advisory_xact_lock(hashtextextended('naive ' || %s, 0))", [group])
        rows = connection.execute(
            "select event_id, min(id) from pgmb.subscription_events where group_id = %s and event_id > coalesce("
            "(select id from naive_reader where group_id = %s), '') group by 1 order by 1 limit 1000",
            [group, group],
        ).fetchall()
        if rows:
            keep(group)(connection, [Change(row[0], row[1], None, {}) for row in rows])
            connection.execute(
                "insert into naive_reader values (%s, %s) on conflict (group_id) do update set id = excluded.id",
                [group, rows[-1][0]],
            )
    return len(rows)


@dataclass(frozen=True)
class Batch:
    """Processes a batch of a feed, and records it in ``work``. Some batches fail on purpose."""

    feed: Feed
    keep: Callable[[Connection, Sequence[Change]], None]
    limit: int

    def work(self, log: Connection, consumer: Failing, chance: random.Random) -> int:
        """Process a batch. Return the number of its changes, or 1 if it failed."""

        def fails() -> bool:
            log.execute("insert into work (process, feed) values (%s, %s)", [os.getpid(), self.feed.name])
            time.sleep(chance.random() * 0.03)
            return chance.random() < consumer.failures

        try:
            count = consume_once(self.feed, consumer.results, consumer.source, self.limit, fails, self.keep)
        except ConsumerFailed:
            end_work(log, os.getpid(), "failed")
            return 1
        end_work(log, os.getpid(), "acked")
        return count


class Process:
    """A consumer's process."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.chance = random.Random(consumer.seed)

    def run(self, stopped: Callable[[], bool]) -> None:
        def work() -> None:
            with connect(self.consumer.source) as log:
                end_work(log, os.getpid(), "cut off")
                self.rounds(log, stopped)

        through_faults(work, stopped)

    def rounds(self, log: Connection, stopped: Callable[[], bool]) -> None:
        while not stopped():
            groups = self.chance.sample(self.consumer.groups, len(self.consumer.groups))
            if not sum(self.work(log, group) for group in groups):
                time.sleep(PAUSE)

    def work(self, log: Connection, group: str) -> int:
        """Process one batch of a group, and return the number of its events."""
        if self.consumer.fault:
            return read_by_id_alone(self.consumer, group)

        one = Batch(EventFeed(group), keep(group), self.chance.choice([1, 7, 50, 1000]))
        return one.work(log, self.consumer, self.chance)


def command(consumer: Consumer) -> list[str]:
    """Return the command that starts a process."""
    return [sys.executable, "-m", "tests.chaos.event_worker", json.dumps(asdict(consumer))]


def main() -> None:
    parent, asked = os.getppid(), []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    Process(Consumer(**json.loads(sys.argv[1]))).run(lambda: bool(asked) or os.getppid() != parent)


if __name__ == "__main__":
    main()
