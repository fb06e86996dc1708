"""Consumers of the campaign over all feeds, each of which works through its feeds in rounds."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.admin import maintenance
from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.events import Delivery, EventHandlers, Handler
from airflow_pgchange.feeds import Change, CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.messages import RollBack, TryAgain, Work, handle_saga
from airflow_pgchange.messages.saga_handling import Answer
from tests.chaos import event_worker, mirror_worker
from tests.chaos.crew import end_work
from tests.chaos.event_worker import Batch
from tests.chaos.harness import ConsumerFailed, harmed, keep_commits
from tests.chaos.mirror_worker import TUBES, Backfill
from tests.chaos.steps import Reached
from tests.sagas import WORKED, note, ready, refused_step

Connection = psycopg.Connection[Any]
HANDLED = "handled"
"""The group of the event log that handlers read."""
COMMITS = "mixed"
RETRIES = (0.1,) * 50
RUNS = itertools.count(1)
"""The numbers of this process's runs of handlers. A consumer that begins anew after a fault goes on with them."""


@dataclass(frozen=True)
class Place:
    """Where a consumer works. ``fault``: none, or a fault of ``harmed``."""

    source: str
    results: str
    folder: str
    seed: str
    groups: Sequence[str] = ()
    in_order: bool = False
    failures: float = 0.1
    fault: str = ""

    @property
    def chance(self) -> random.Random:
        return random.Random(f"{self.seed} {os.getpid()}")


@dataclass
class Notes:
    """A file of a process, a line for each note. A note is there once it was written, whoever is killed then."""

    file: int

    @classmethod
    def of(cls, place: Place, kind: str) -> Notes:
        path = Path(place.folder) / f"{kind} {os.getpid()}.notes"
        return cls(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY))

    def write(self, **noted: Any) -> None:
        os.write(self.file, json.dumps(noted).encode() + b"\n")

    @staticmethod
    def read(folder: Path, whose: str) -> list[list[dict[str, Any]]]:
        """The notes of each process: of a kind, or of a kind and a process."""
        paths = sorted(folder.glob(f"{whose}*.notes"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


class Batches:
    """Works through batches of feeds whose results are written in the consumer transaction."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        self.place, self.log, self.reached, self.chance = place, log, reached, place.chance
        end_work(log, os.getpid(), "cut off", "began")

    def feeds(self) -> Iterator[Batch]:
        """A batch of each feed."""
        raise NotImplementedError

    def round(self) -> int:
        """Work one batch of each feed. Return how many changes there were."""
        return sum(batch.work(self.log, self.place, self.chance) for batch in self.feeds())

    @property
    def limit(self) -> int:
        return self.chance.choice([1, 7, 50, 1000])


class Commits(Batches):
    def feeds(self) -> Iterator[Batch]:
        feed = CommitFeed(COMMITS, 0, in_order=self.place.in_order)
        yield Batch(feed, _harmed(self.place, keep_commits), self.limit)


class Events(Batches):
    def feeds(self) -> Iterator[Batch]:
        for group in self.chance.sample(self.place.groups, len(self.place.groups)):
            yield Batch(EventFeed(group), _harmed(self.place, event_worker.keep(group)), self.limit)


class Topology(Batches):
    def feeds(self) -> Iterator[Batch]:
        def keep(connection: Connection, changes: Sequence[Change]) -> None:
            connection.cursor().executemany(
                "insert into heard (id) values (%s)", [[one.id] for one in changes]
            )

        yield Batch(TopologyFeed("mixed"), _harmed(self.place, keep), self.limit)


class Messages(Batches):
    """Receives by the feed or by SQL. Results are kept at the queue."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        super().__init__(place, log, reached)
        self.place = _at_the_source(place)

    def feeds(self) -> Iterator[Batch]:
        for consumer in ("default", "even"):
            keep = _harmed(
                self.place, lambda c, changes, by=consumer: _receive(c, by, [one.id for one in changes])
            )
            yield Batch(QueueFeed("orders", consumer), keep, self.limit)

    def round(self) -> int:
        return super().round() + sum(self.consume(consumer) for consumer in ("default", "even"))

    def consume(self, consumer: str) -> int:
        query = f"select iid from mbus.consumen_orders_by_{consumer}(%s)"
        with self.log.transaction():
            iids = [iid for (iid,) in self.log.execute(query, [self.limit]).fetchall()]
            _receive(self.log, consumer, iids)
            self.reached("received")
        return len(iids)


def _receive(connection: Connection, consumer: str, iids: Sequence[str]) -> None:
    connection.execute(
        "insert into received (consumer, iid) select %s, unnest(%s::text[])", [consumer, list(iids)]
    )


class Sagas(Batches):
    """Does and undoes the steps of sagas, a message a transaction."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        super().__init__(place, log, reached)
        self.place = _at_the_source(place)

    def feeds(self) -> Iterator[Batch]:
        def keep(connection: Connection, changes: Sequence[Change]) -> None:
            handle_saga(connection, changes[0], self.do)

        for queue in self.chance.sample(WORKED, len(WORKED)):
            if ready(self.log, queue):
                yield Batch(QueueFeed(queue), keep, 1)

    def do(self, work: Work, connection: Connection) -> Answer:
        for _ in range({"": 1, "skips": 0, "doubles": 2}[self.place.fault]):
            note(work, connection)
        self.reached("worked")
        if work.kind == "step" and work.step == refused_step(work.saga):
            return RollBack("full")
        if work.attempt == 1 and self.chance.random() < 0.1:
            return TryAgain("engaged", timedelta())
        return None


class Tubes:
    """Keeps the mirrors of all tubes, and notes the ids that it replayed."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        end_work(log, os.getpid(), "cut off", "began")
        seed = f"{place.seed} {os.getpid()}"
        worker = mirror_worker.Worker(place.source, place.source, 0, seed, place.failures, place.fault)
        self.process = mirror_worker.Process(worker, _replayed)

    def round(self) -> int:
        """Work a batch of each tube, for any of its workers: there may be more workers than processes."""
        number = self.process.chance.randrange(60)
        self.process.worker = replace(self.process.worker, number=number)
        self.process.feeds = {tube: self.process.made(tube) for tube in TUBES}
        return sum(self.process.work(tube) for tube in TUBES)


def _replayed(connection: Connection, feed: TubeFeed, changes: Sequence[Change]) -> None:
    shards, ids = [one.data["shard"] for one in changes], [one.id for one in changes]
    connection.execute(
        "insert into replayed (tube, shard, id) select %s, u.* from unnest(%s::integer[], %s::bigint[]) as u",
        [feed.tube, shards, ids],
    )


class Handlers:
    """Runs the handlers of one group for a moment. They note what they were called with."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        self.place, self.reached, self.chance = place, reached, place.chance
        self.notes = Notes.of(place, "handlers")
        self.run = 0
        self.until: Any = 0.5

    def handler(self, name: str, **options: Any) -> Handler:
        def called(delivery: Delivery) -> None:
            events = [event.id for event in delivery.events]
            if self.chance.random() < self.place.failures / 2:
                self.notes.write(run=self.run, handler=name, failed=events)
                raise ConsumerFailed
            self.reached("called")
            ids = {"": events, "skips": events[1:], "doubles": [*events, events[0]]}[self.place.fault]
            self.notes.write(run=self.run, handler=name, attempt=delivery.attempt, ids=ids)
            self.reached("noted")

        return Handler(name, called, retries=RETRIES, timeout=60, **options)

    def round(self) -> int:
        self.run = next(RUNS)
        each = [self.handler("all"), self.handler("keyed", key=lambda event: event.topic, threads=2)]
        handlers = EventHandlers(HANDLED, each, self.place.source, limit=50, poll_interval=0.05)
        with suppress(ConsumerBusy):
            done = handlers.run(self.until)
            self.notes.write(run=self.run, finished=True)
            return done.batches
        time.sleep(0.1)
        return 0


class Backfills:
    """Backfills the tables of all tubes, one after the other."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        self.source = place.source

    def round(self) -> int:
        for tube in TUBES:
            Backfill(self.source, tube, 50).run()
        time.sleep(5)
        return 0


class Upkeep:
    """Maintenance of the whole database."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        self.log, self.notes = log, Notes.of(place, "upkeep")

    def round(self) -> int:
        report = maintenance.maintain(self.log)
        self.notes.write(done=report.done, attention=report.attention, failed=report.failed)
        time.sleep(1)
        return 0


KINDS: Mapping[str, Callable[[Place, Connection, Reached], Any]] = {
    "commits": Commits,
    "tubes": Tubes,
    "events": Events,
    "handlers": Handlers,
    "messages": Messages,
    "sagas": Sagas,
    "topology": Topology,
    "backfills": Backfills,
    "upkeep": Upkeep,
}


@contextmanager
def at_work(kind: str, place: Place, reached: Reached = lambda step: None) -> Iterator[Any]:
    """A consumer with a connection to the source, for as long as the block lasts."""
    with connect(place.source) as log:
        yield KINDS[kind](place, log, reached)


def _harmed(
    place: Place, keep: Callable[[Connection, Sequence[Change]], None]
) -> Callable[[Connection, Sequence[Change]], None]:
    return lambda connection, changes: keep(connection, harmed(changes, place.fault))


def _at_the_source(place: Place) -> Place:
    return replace(place, results=place.source)
