"""Consumers of the campaign over all feeds. Each processes its feeds in rounds."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from airflow_pgchange.admin import maintenance
from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.events import Delivery, EventHandlers, Handler
from airflow_pgchange.feeds import Change, CommitFeed, EventFeed, TopologyFeed, TubeFeed
from airflow_pgchange.feeds.connections import connect
from tests.chaos import event_worker, mirror_worker
from tests.chaos.crew import end_work
from tests.chaos.event_worker import Batch
from tests.chaos.harness import ConsumerFailed, keep_commits
from tests.chaos.mirror_worker import TUBES, Backfill
from tests.chaos.mixed_place import Batches, Connection, Notes, Place, harmed_keep
from tests.chaos.queue_consumers import Calls, Messages, Sagas
from tests.chaos.steps import Reached

HANDLED = "handled"
"""The group of the event log that handlers read."""
COMMITS = "mixed"
RETRIES = (0.1,) * 50
RUNS = itertools.count(1)
"""The numbers of this process's runs of handlers. When a consumer starts again after a fault, they continue."""


class Commits(Batches):
    def feeds(self) -> Iterator[Batch]:
        feed = CommitFeed(COMMITS, 0, in_order=self.place.in_order)
        yield Batch(feed, harmed_keep(self.place, keep_commits), self.limit)


class Events(Batches):
    def feeds(self) -> Iterator[Batch]:
        for group in self.chance.sample(self.place.groups, len(self.place.groups)):
            yield Batch(EventFeed(group), harmed_keep(self.place, event_worker.keep(group)), self.limit)


class Topology(Batches):
    def feeds(self) -> Iterator[Batch]:
        def keep(connection: Connection, changes: Sequence[Change]) -> None:
            connection.cursor().executemany(
                "insert into heard (id) values (%s)", [[one.id] for one in changes]
            )

        yield Batch(TopologyFeed("mixed"), harmed_keep(self.place, keep), self.limit)


class Tubes:
    """Keeps the mirrors of all tubes, and records the replayed ids."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        end_work(log, os.getpid(), "cut off", "began")
        seed = f"{place.seed} {os.getpid()}"
        worker = mirror_worker.Worker(place.source, place.source, 0, seed, place.failures, place.fault)
        self.process = mirror_worker.Process(worker, _replayed)

    def round(self) -> int:
        """Process a batch of each tube, for any of its workers, because there may be more workers than processes."""
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
    """Runs the handlers of one group for a short time. The handlers record their calls."""

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
    "singles": partial(Calls, limits=[1]),
    "batches": partial(Calls, limits=[3, 10, 50, 200]),
    "sagas": Sagas,
    "topology": Topology,
    "backfills": Backfills,
    "upkeep": Upkeep,
}


@contextmanager
def at_work(kind: str, place: Place, reached: Reached = lambda step: None) -> Iterator[Any]:
    """Yield a consumer with a connection to the source."""
    with connect(place.source) as log:
        yield KINDS[kind](place, log, reached)
