"""Publishers that commit late, roll back or crash, and maintenance that runs all the time."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.chaos.event_worker import PAUSE, cut_off
from tests.chaos.harness import Campaign, commit_in_two_phases
from tests.chaos.kills import until

Connection = psycopg.Connection[Any]
NOW, LATER, LONG_AGO = "0", "300 ms", "-1 hour"
"""The time of delivery of an event, relative to now."""
AHEAD = 5000
"""Publishers pause if the group that gets everything lags by this number of events, so that readers can follow on a
busy machine."""


def publish(
    connection: Connection, kind: str, payloads: Sequence[Mapping[str, Any]], at: str = NOW
) -> list[str]:
    """Publish events of the topics a, b and c by one statement, record them in the ledger, and return their ids.
    ``direct`` events go to the group of that name."""
    direct = (
        "select s.id from pgmb.subscriptions as s where s.group_id = 'direct'" if kind == "direct" else "null"
    )
    id = "pgmb.create_event_id_default()"
    if at != NOW:
        id = f"pgmb.create_event_id(clock_timestamp() + interval '{at}', nextval('pgmb.event_seq'))"
    rows = connection.execute(
        "with sent as (insert into pgmb.events (id, topic, payload, metadata, subscription_id) "
        f"select {id}, substr('abc', 1 + (p ->> 'n')::int %% 3, 1), p, %s, ({direct}) "
        "from jsonb_array_elements(%s) with ordinality as o(p, n) order by o.n returning *), "
        "noted as (insert into ledger select * from sent) select id from sent",
        [Jsonb({"kind": kind}), Jsonb(list(payloads))],
    )
    return [row[0] for row in rows.fetchall()]


@dataclass
class Publisher:
    """A session that publishes in savepoints, late, rolled back, prepared or for later, and the outcome of each."""

    source: str
    number: int
    campaign: Campaign
    stopping: threading.Event
    ahead: threading.Event
    acknowledged: list[str] = field(default_factory=list)
    to_one: int = 0
    """The number of events that went to one other group, and so not to the group that gets everything."""
    done: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        chance = random.Random(f"{self.campaign.seed} publisher {self.number}")
        numbers = itertools.count()
        while not self.stopping.is_set():
            try:
                with psycopg.connect(self.source, autocommit=True) as connection:
                    while not self.stopping.is_set():
                        if self.ahead.is_set():
                            self.stopping.wait(PAUSE)
                        else:
                            self.transaction(connection, chance, numbers)
            except psycopg.OperationalError as error:
                if not cut_off(error):
                    self.errors.append(error)
                    return
                self.done["cut off"] += error.sqlstate == "57P02" or error.sqlstate is None
                self.stopping.wait(PAUSE)
            except psycopg.Error as error:
                self.errors.append(error)
                return

    def transaction(self, connection: Connection, chance: random.Random, numbers: Iterator[int]) -> None:
        def some(kind: str, at: str = NOW) -> list[str]:
            payloads = [
                {"publisher": str(self.number), "n": next(numbers)} for _ in range(chance.randint(1, 8))
            ]
            made[kind] += 1
            return publish(connection, kind, payloads, at)

        made: Counter[str] = Counter()
        direct: list[str] = []
        prepared = chance.random() < 0.1
        connection.execute("begin")
        ids = some("prepared" if prepared else "plain")
        if chance.random() < 0.2:
            direct = some("direct")
            ids += direct
        if chance.random() < 0.2:
            ids += some("scheduled", LATER)
        if chance.random() < 0.1:
            ids += some("old", LONG_AGO)
        if chance.random() < 0.3:
            connection.execute("savepoint s")
            inner = some("in a savepoint")
            if chance.random() < 0.5:
                connection.execute("rollback to s")
                made["undone savepoint"] += 1
            else:
                ids += inner
        if chance.random() < 0.1:
            self.stopping.wait(chance.random() * self.campaign.delay)
        if chance.random() < self.campaign.rollbacks:
            connection.execute("rollback")
            self.done["rolled back"] += 1
            return
        if prepared:
            commit_in_two_phases(connection, chance, 0)
        else:
            connection.execute("commit")
        self.acknowledged += ids
        self.to_one += len(direct)
        self.done += made


@contextmanager
def publishing(source: str, results: str, campaign: Campaign) -> Iterator[list[Publisher]]:
    """Run publishers until the block ends."""
    stopping, ahead = threading.Event(), threading.Event()
    publishers = [Publisher(source, n, campaign, stopping, ahead) for n in range(campaign.writers)]

    def hold_back() -> None:
        while not stopping.wait(0.5):
            published = sum(len(publisher.acknowledged) - publisher.to_one for publisher in publishers)
            try:
                with psycopg.connect(results, autocommit=True) as connection:
                    read = connection.execute("select count(*) from effect where group_id = 'everything'")
                    [(count,)] = read.fetchall()
            except psycopg.OperationalError as error:
                if not cut_off(error):
                    raise
                continue
            if published - count > AHEAD:
                ahead.set()
            else:
                ahead.clear()

    with _running([*(publisher.run for publisher in publishers), hold_back], stopping):
        yield publishers


@contextmanager
def maintaining(source: str) -> Iterator[list[str]]:
    """Run maintenance without a pause until the block ends, each time with another length of partitions. Yield its
    log."""
    stopping, told = threading.Event(), list[str]()

    def maintain() -> None:
        for width in itertools.cycle(("2 seconds", "1 second")):
            if stopping.is_set():
                return
            try:
                with psycopg.connect(source, autocommit=True) as connection:
                    connection.execute(
                        "update pgmb.config set value = %s where key = 'partition_interval'", [width]
                    )
                    for query in (
                        "select pgmb.maintain_events_table()",
                        "select pgmb.drop_emptied('pgmb.events', spare => 0)",
                        "select pgmb.drop_emptied('pgmb.dispatched', spare => 0)",
                    ):
                        told.extend(row[0] for row in connection.execute(query).fetchall())
            except psycopg.OperationalError as error:
                if not cut_off(error):
                    told.append(f"failed: {error}")
                    return
            stopping.wait(PAUSE)

    with _running([maintain], stopping):
        yield told


@contextmanager
def _running(targets: Sequence[Callable[[], None]], stopping: threading.Event) -> Iterator[None]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def wait_for_more(publishers: Sequence[Publisher], count: int = 200) -> None:
    """Wait until this number of further events was acknowledged."""

    def acknowledged() -> int:
        assert not any(publisher.errors for publisher in publishers)
        return sum(len(publisher.acknowledged) for publisher in publishers)

    goal = acknowledged() + count
    until(lambda: acknowledged() >= goal, "more events to be published")
