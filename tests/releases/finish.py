"""Finish the work that ``filling`` has begun, and compare the processed changes with the written changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import psycopg

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import StaleClaim
from airflow_pgchange.events import EventHandlers, Handler
from airflow_pgchange.feeds import ConsumerTransaction
from airflow_pgchange.feeds.feed_kinds import from_json
from tests.batches import connections_reused
from tests.releases.filling.consumers import key_of, record, returned, work
from tests.releases.filling.contents import FEEDS, handle_next
from tests.releases.filling.objects import TOUR

Connection = psycopg.Connection[Any]
AFTER = 101
"""The number of the first change that is written after the upgrade."""


def finish(connection: Connection, db: str, *, is_restored: bool = False) -> None:
    """End leases, write more changes, and process everything, also dead letters.

    A restored batch of some feeds refuses its handle, because its position has changed. It is claimed again.
    """
    feeds = consumers(connection)
    states = returned(connection, "select state, handle from worker order by consumer")
    with connections_reused():
        for feed, (state, handle) in zip(feeds, states, strict=True):
            if state == "leased":
                with suppress(StaleClaim) if is_restored else nullcontext():
                    ack(Handle.from_text(handle), db)
            if state in ("leased", "lent"):
                manual_operations.end_leases(connection, feed)
        for system in systems(connection):
            FEEDS[system][0](connection, AFTER)
        complete_backfills(connection)
        drain(connection, db, feeds)
        for letter in dead_letters.letters(connection):
            if letter.hindrance is None:
                dead_letters.redrive(connection, ids=[letter.id])
        drain(connection, db, feeds)
        run_handlers(connection, db)
        if "mbus" in systems(connection):
            while sum(len(handle_next(db, queue)) for queue in TOUR.worked):
                pass


def consumers(connection: Connection) -> list[Any]:
    return [from_json(feed) for feed in returned(connection, "select feed from worker order by consumer")]


def systems(connection: Connection) -> list[str]:
    """Return the schemas whose feeds have consumers: queues are filled only on a server with the extension hstore."""
    query = (
        "select r.schema from pgchange.registered as r where r.schema = any (%s) "
        "and r.kind in (select w.feed ->> 'kind' from worker as w) order by 1"
    )
    return returned(connection, query, list(FEEDS))


def ack(handle: Handle, db: str) -> None:
    """Process the batch of a lease, and ack it by its handle."""
    with ConsumerTransaction(handle.feed, db) as consumer:
        consumer.resume(handle.token)
        ids = [key_of(change) for change in consumer.changes()]
        consumer.ack(lambda connection: record(connection, handle.feed.name, ids))


def complete_backfills(connection: Connection) -> None:
    for number in returned(connection, "select id from tube.backfill where finished_at is null"):
        while not returned(connection, "select finished from tube.backfill_chunk(%s)", number)[0]:
            pass


def drain(connection: Connection, db: str, feeds: list[Any]) -> None:
    while returned(connection, "select more from pgmb.dispatch()")[0]:
        pass
    for feed in feeds:
        while work(feed, db):
            pass


def run_handlers(connection: Connection, db: str) -> None:
    """Run the handler whose events failed, until the time of their retry has come."""
    handled: Counter[str] = Counter()

    def note(delivery: Any) -> None:
        handled.update(str(event.payload["n"]) for event in delivery.events)

    deadline = time.monotonic() + 10
    expected = set(returned(connection, "select id from expected where source = 'events'"))
    while set(handled) < expected and time.monotonic() < deadline:
        EventHandlers("handled", [Handler("record", note, retries=(1, 1))], db, poll_interval=0.01).run(
            "empty"
        )
    record(connection, "handled", handled.elements())


def wrong(connection: Connection) -> Iterator[str]:
    """Yield a line for each consumer that has not processed each change exactly once.

    Dead letters of commits cannot be sent after a restore, so their changes are missed.
    """
    connection.execute("insert into expected select 'accounts', id from pgmb.events where topic ~ 'account'")
    connection.execute("insert into worker (consumer, source) values ('handled', 'events')")
    kept_back = Counter[str]()
    for letter in dead_letters.letters(connection):
        kept_back[letter.consumer] += letter.changes
    for consumer, source in connection.execute("select consumer, source from worker order by 1").fetchall():
        done = Counter(returned(connection, "select id from done where consumer = %s", consumer))
        expected = Counter(returned(connection, "select id from expected where source = %s", source))
        missed, repeated = expected - done, done - expected
        if missed.total() != kept_back[consumer]:
            yield f"{consumer} missed {sorted(missed.elements())}"
        if repeated:
            yield f"{consumer} repeated {sorted(repeated.elements())}"
    steps = [f"step {step.name}" for step in TOUR.steps] + ["end None"]
    if "mbus" in systems(connection):
        sagas = returned(connection, "select id, state from mbus.sagas")
        if [state for _, state in sagas] != ["complete"] * 3:
            yield f"the sagas are {sagas}"
        for saga, _ in sagas:
            done = returned(connection, "select id from done where consumer = %s", f"saga {saga}")
            if sorted(done) != sorted(steps):
                yield f"saga {saga} did {done}"
