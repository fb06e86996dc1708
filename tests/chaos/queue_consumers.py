"""Consumers of message queues: by the feed, by calls in SQL, and of the steps of sagas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import psycopg

from airflow_pgchange.feeds import Change, QueueFeed
from airflow_pgchange.messages import RollBack, TryAgain, Work, handle_saga
from airflow_pgchange.messages.saga_handling import Answer
from tests.chaos.event_worker import Batch
from tests.chaos.mixed_place import Batches, Connection, Place, harmed_keep
from tests.chaos.steps import Reached
from tests.sagas import WORKED, note, ready, refused_step

CALLS = (1, 1, 1, 5, 70)
"""The possible numbers of calls in a transaction. From its 65th message on, a transaction locks whole parts."""


class Messages(Batches):
    """Receives messages by the feed or by SQL. The results are in the database of the queue."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        super().__init__(place, log, reached)
        self.place = _at_the_source(place)

    def feeds(self) -> Iterator[Batch]:
        for consumer in ("default", "even"):
            keep = harmed_keep(
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


class Calls(Messages):
    """Receives messages by SQL alone, at most one of ``limits`` in a call. Some transactions are rolled back."""

    def __init__(self, place: Place, log: Connection, reached: Reached, limits: Sequence[int]) -> None:
        super().__init__(place, log, reached)
        self.limits = limits

    def feeds(self) -> Iterator[Batch]:
        return iter(())

    def consume(self, consumer: str) -> int:
        iids: list[str] = []
        with self.log.transaction() as transaction:
            for _ in range(self.chance.choice(CALLS)):
                found = self.call(consumer, self.chance.choice(self.limits))
                if not found:
                    break
                iids += found
            _receive(self.log, consumer, iids)
            self.reached("received")
            if self.chance.random() < self.place.failures:
                raise psycopg.Rollback(transaction)
        return len(iids)

    def call(self, consumer: str, limit: int) -> list[str]:
        """Receive messages by one call. A limit of 1 uses the function that takes the names of the queue and the
        consumer."""
        if limit == 1:
            rows = self.log.execute("select iid from mbus.consume('orders', %s)", [consumer])
        else:
            rows = self.log.execute(f"select iid from mbus.consumen_orders_by_{consumer}(%s)", [limit])
        return [iid for (iid,) in rows]


def _receive(connection: Connection, consumer: str, iids: Sequence[str]) -> None:
    connection.execute(
        "insert into received (consumer, iid) select %s, unnest(%s::text[])", [consumer, list(iids)]
    )


class Sagas(Batches):
    """Does and compensates the steps of sagas, with a transaction for each message."""

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


def _at_the_source(place: Place) -> Place:
    return replace(place, results=place.source)
