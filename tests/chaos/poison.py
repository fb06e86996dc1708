"""A feed of which one change in a hundred is poison, a consumer that is killed at random steps, and a verdict.

The consumer is a process that kills itself by SIGKILL before or after a random statement. So it dies at any step of a
batch: at the claim, during processing, at the ack, or while its error or letter is written.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.feeds import Batch, ConsumerTransaction
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queries import ask
from tests.batches import connections_reused

Connection = psycopg.Connection[Any]
RESULT = "create table public.result (place bigint generated always as identity, id text not null)"
OUTAGES = 0.05
"""The share of attempts that fail with an outage."""
STATEMENTS = 150
"""A consumer dies before or after a random statement among its first 150, unless it ends earlier."""
PATIENCE = 60.0

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class Poison(Exception):
    """Raised by the processing of a bad change."""


@dataclass(frozen=True)
class Orders:
    """The orders to a consumer: it processes the feed to its end, and fails on the changes of ``poison``."""

    feed: Feed
    db: str
    poison: frozenset[str]
    limit: int
    attempts: int
    log: Path
    chance: str
    was_killed: bool
    fault: str
    """The planted fault, such as ``loses a change``. Empty if there is none."""


class Consumer:
    """A process that consumes the feed, and dies at a random statement.

    If the process before it was killed, it dies only after its first transaction. Otherwise a batch whose process died
    at each of its attempts would wait for a person.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.chance = random.Random(orders.chance)
        self.left = self.chance.randrange(1, 2 * STATEMENTS)
        self.armed = not orders.was_killed
        self.on_parts = 0
        self.tries: Counter[str] = Counter()

    def die_in_time(self) -> None:
        self.left -= self.armed
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_statements(self) -> None:
        execute, leave = psycopg.Cursor.execute, ConsumerTransaction.__exit__

        def counted(cursor: psycopg.Cursor[Any], *arguments: Any, **options: Any) -> Any:
            self.die_in_time()
            answer = execute(cursor, *arguments, **options)
            self.die_in_time()
            return answer

        def left(transaction: ConsumerTransaction, *error: Any) -> None:
            try:
                leave(transaction, *error)
            finally:
                self.armed = True

        psycopg.Cursor.execute = counted  # type: ignore[method-assign,assignment]
        ConsumerTransaction.__exit__ = left  # type: ignore[method-assign]

    def process(self, transaction: ConsumerTransaction, batch: Batch) -> None:
        self.note(batch)
        ids = [str(change.id) for change in transaction.changes()]
        bad = sorted(self.orders.poison & set(ids))
        self.tries[batch.id] += 1
        in_vain = self.orders.fault == "fails in vain" and self.tries[batch.id] <= 8
        if self.armed and (in_vain or self.chance.random() < OUTAGES):
            raise ServerUnavailable("gone")
        if bad:
            raise Poison(f"bad: {','.join(bad)}")
        rows = [[each] for each in ids]
        if batch.is_part and self.orders.fault == "loses a change":
            rows = rows[1:]
        if batch.is_part and self.orders.fault == "doubles a change":
            rows = rows[:1] + rows
        transaction.ack(
            lambda results: results.cursor().executemany("insert into public.result (id) values (%s)", rows)
        )

    def note(self, batch: Batch) -> None:
        self.on_parts += batch.is_part
        whole = (*batch.parts_of, batch.id)[0]
        line = json.dumps({"whole": whole, "batch": batch.id, "count": batch.count})
        with self.orders.log.open("a") as log:
            log.write(line + "\n")

    def work(self) -> None:
        orders = self.orders
        plan = Plan(
            orders.feed,
            orders.db,
            limit=orders.limit,
            max_batches=None,
            max_attempts=orders.attempts,
            on_give_up="dead_letter" if orders.fault == "whole letters" else "bisect",
        )
        while True:
            self.on_parts = 0
            with suppress(Poison, ServerUnavailable):
                drained = drain(plan, self.process)
                assert drained.extra_attempts == self.on_parts
                return


def _consume(orders: Orders) -> None:
    consumer = Consumer(orders)
    with connections_reused():
        consumer.count_statements()
        consumer.work()


@dataclass(frozen=True)
class Verdict:
    """The numbers of errors. ``neighbours`` are dead letters with other changes than one poisonous change."""

    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    neighbours: int = 0
    without_letter: int = 0
    attempts_too_many: int = 0


RIGHT = Verdict()


@dataclass(frozen=True)
class Campaign:
    """A feed, and ``ids`` in the order of the feed.

    A hundredth of the changes, at least one, is poison. ``line_of`` returns the line to which a change belongs: the
    changes of a line keep their order.
    """

    feed: Feed
    ids: Sequence[str]
    line_of: Callable[[str], Any] | None
    seed: int
    limit: int = 100
    attempts: int = 2
    fault: str = ""

    @property
    def poison(self) -> frozenset[str]:
        chance = random.Random(f"{self.seed} poison")
        return frozenset(chance.sample(list(self.ids), max(1, len(self.ids) // 100)))

    def run(self, db: str, connection: Connection, folder: Path) -> tuple[Verdict, int]:
        """Consume the feed to its end. Return the verdict, and the number of consumers that were killed."""
        connection.execute(RESULT)
        log, kills, was_killed = folder / "attempts", 0, False
        for number in range(1000):
            chance = f"{self.seed} consumer {number}"
            orders = Orders(
                self.feed, db, self.poison, self.limit, self.attempts, log, chance, was_killed, self.fault
            )
            consumer = _processes.Process(target=_consume, args=[orders])
            consumer.start()
            consumer.join()
            was_killed = consumer.exitcode == -signal.SIGKILL
            if not was_killed:
                assert consumer.exitcode == 0
                break
            kills += 1
            _until_free(connection, self.feed)
        return self._judge(connection, log, kills), kills

    def _judge(self, connection: Connection, log: Path, kills: int) -> Verdict:
        rows = connection.execute("select id from public.result order by place").fetchall()
        done = [row[0] for row in rows]
        letters = dead_letters.letters(connection)
        alone = Counter((letter.error or "").rpartition(": ")[2] for letter in letters if letter.changes == 1)
        healthy = set(self.ids) - self.poison
        return Verdict(
            lost=len(healthy - set(done)),
            doubled=len(done) - len(set(done)) + len(set(done) - healthy),
            disordered=self._disordered(done),
            neighbours=len(letters) - sum(alone[each] > 0 for each in self.poison),
            without_letter=sum(alone[each] == 0 for each in self.poison),
            attempts_too_many=max(0, self._extra_attempts(log) - self._bound(kills, log)),
        )

    def _disordered(self, done: Sequence[str]) -> int:
        if self.line_of is None:
            return 0
        place = {each: number for number, each in enumerate(self.ids)}
        last: dict[Any, int] = {}
        wrong = 0
        for each in done:
            line = self.line_of(each)
            wrong += place[each] < last.get(line, -1)
            last[line] = place[each]
        return wrong

    def _extra_attempts(self, log: Path) -> int:
        """Return the number of attempts on whole batches after the first attempt, and of all attempts on their
        parts."""
        attempts = [json.loads(line) for line in log.read_text().splitlines()]
        return len(attempts) - len({each["whole"] for each in attempts})

    def _bound(self, kills: int, log: Path) -> int:
        """Return the maximum number of attempts that poison, kills and outages explain.

        Half a batch of commits can begin within a transaction, so it takes up to two halvings.
        """
        attempts = [json.loads(line) for line in log.read_text().splitlines()]
        halvings = math.ceil(math.log2(min(self.limit, len(self.ids)))) * (
            2 if self.feed.kind == "commit" else 1
        )
        outages = 3 * math.ceil(OUTAGES * len(attempts)) + 3
        return len(self.poison) * self.attempts * (1 + 2 * halvings) + kills + outages


def _until_free(connection: Connection, feed: Feed) -> None:
    """Wait until the server has noticed that the consumer was killed, and has released its lock."""
    deadline = time.monotonic() + PATIENCE
    while ask(connection, feed.locked()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
