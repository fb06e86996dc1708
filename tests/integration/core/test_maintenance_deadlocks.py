"""If PostgreSQL looks for deadlocks at once, maintenance in a loop cancels no other transaction, and does not fail
itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    Feed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.feeds.connections import connect as connect_ours
from tests import commits, queues, topology, tubes
from tests.batches import taken
from tests.event_keeping import configure
from tests.events import publish, subscribe
from tests.waiting import until, waits

Work = Callable[[psycopg.Connection[Any], int], object]


@pytest.fixture
def impatient(db: str) -> str:
    """A database in which a session looks for a deadlock after waiting for a lock for a millisecond."""
    with psycopg.connect(db, autocommit=True) as connection:
        connection.execute(
            sql.SQL("alter database {} set deadlock_timeout = '1ms'").format(
                sql.Identifier(connection.info.dbname)
            )
        )
    return db


@pytest.fixture(params=[2, pytest.param(8, marks=pytest.mark.release("more rounds of the same"))])
def rounds(request: pytest.FixtureRequest) -> int:
    """The rounds of maintenance beside the other sessions. The second round processes what the first has left."""
    return int(request.param)


def beside(db: str, rounds: int, maintain: Work, *others: Work) -> None:
    """Run this number of rounds of maintenance, and repeat the others until the rounds are over. Return the first
    error."""
    over = threading.Event()

    def work(one: Work, rounds: int | None) -> None:
        with connect_ours(db) as connection:
            number = 0
            while not over.is_set() and number != rounds:
                one(connection, number)
                number += 1

    with ThreadPoolExecutor(1 + len(others)) as pool:
        maintained = pool.submit(work, maintain, rounds)
        running = [pool.submit(work, one, None) for one in others]
        maintained.add_done_callback(lambda _: over.set())
        for one in running:
            one.add_done_callback(lambda done: done.exception() and over.set())
    for one in (maintained, *running):
        one.result()


def reading(feed: Feed, db: str) -> Work:
    def read(_: psycopg.Connection[Any], __: int) -> None:
        with ConsumerTransaction(feed, db, busy_timeout=None) as consumer:
            if consumer.claim(20) is not None:
                list(consumer.changes())
                consumer.ack()

    return read


STEPS = (
    "trim_partitions({}, now() + {})",
    "make_partitions({}, now() + {})",
    "drop_emptied({}, now() + {}, 0)",
)


def _events(connection: psycopg.Connection[Any], number: int) -> None:
    """Partitions that were created in advance are replaced by shorter or longer partitions, and old partitions are
    emptied and dropped."""
    width = ("1 hour", "10 minutes")[number % 2]
    configure(connection, partition_interval=width, partition_retention_period="2 hours")
    for table in ("pgmb.dispatched", "pgmb.events"):
        for step in STEPS:
            call = sql.SQL("select pgmb." + step).format(table, f"{number} hours")  # type: ignore[arg-type]
            connection.execute(call)
    connection.execute("select pgmb.maintain_events_table()")


def test_partitions_of_events_are_made_and_dropped_beside_who_publishes_polls_and_reads(
    impatient: str, rounds: int
) -> None:
    with connect_ours(impatient) as connection:
        subscribe(connection)
    beside(
        impatient,
        rounds,
        _events,
        lambda connection, _: publish(connection, "a", "b"),
        lambda connection, _: connection.execute("select pgmb.poll_for_events()"),
        lambda connection, _: connection.execute("select pgmb.poll_for_events()"),
        reading(EventFeed("g"), impatient),
    )


def _commits(connection: psycopg.Connection[Any], _: int) -> None:
    connection.execute("select revision.maintain_partitions(20, 2)")
    connection.execute("select pubsub.trim_commit_queue('0')")
    connection.execute("select revision.drop_empty_partitions(0)")


def test_partitions_of_commits_are_made_and_dropped_beside_who_writes_and_reads(
    impatient: str, rounds: int
) -> None:
    beside(
        impatient,
        rounds,
        lambda connection, number: [_commits(connection, number) for _ in range(10)],
        lambda connection, _: commits.commits(connection),
        lambda connection, _: commits.commits(connection),
        reading(CommitFeed("a", 0), impatient),
        reading(CommitFeed("b", 0, in_order=True), impatient),
    )


def _all(connection: psycopg.Connection[Any], _: int) -> None:
    assert maintain(connection, retention="0").failed == []
    connection.execute("select topology.trim_log('0')")


@pytest.mark.hstore
def test_maintenance_of_all_runs_beside_tubes_queues_and_the_topology(impatient: str, rounds: int) -> None:
    with connect_ours(impatient) as connection:
        connection.execute("create table public.item (id bigint primary key)")
        tubes.make(connection, "q")
        tubes.attach(connection)
        queues.make(connection)
        topology.make_catalogue(connection)
    beside(
        impatient,
        rounds,
        _all,
        lambda connection, number: connection.execute("insert into public.item values (%s)", [number]),
        queues.post,
        lambda connection, number: connection.execute(
            "select topology.set_state('r1-i2', %s)", [("Offline", "Online")[number % 2]]
        ),
        reading(TubeFeed("q"), impatient),
        reading(QueueFeed("q"), impatient),
        reading(TopologyFeed("t"), impatient),
    )


def test_maintenance_that_locks_in_the_wrong_order_and_waits_would_be_noticed(impatient: str) -> None:
    def locking(first: str, second: str) -> Work:
        def lock(connection: psycopg.Connection[Any], _: int) -> None:
            with connection.transaction():
                for table in (first, second):
                    query = sql.SQL("lock table only {} in access exclusive mode")
                    connection.execute(query.format(sql.Identifier("pgmb", table)))
                    connection.execute("select pg_sleep(0.01)")

        return lock

    def wrong(connection: psycopg.Connection[Any], number: int) -> None:
        for _ in range(100):
            locking("dispatched", "events")(connection, number)

    with pytest.raises(errors.DeadlockDetected):
        beside(impatient, 1, wrong, locking("events", "dispatched"))


def test_a_claim_that_is_ended_to_let_others_out_of_a_deadlock_is_made_anew(impatient: str) -> None:
    with (
        connect_ours(impatient) as looking,
        psycopg.connect(impatient) as first,
        psycopg.connect(impatient) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        subscribe(looking)
        publish(looking, "a")
        looking.execute("select pgmb.poll_for_events()")
        [[part]] = looking.execute("select tableoid::regclass::text from pgmb.dispatched").fetchall()
        other.execute("set deadlock_timeout = '1h'")
        lock = "lock table only {} in access exclusive mode"
        first.execute(lock.format(part))  # type: ignore[arg-type]
        other.execute(lock.format("pgmb.dispatched_default"))  # type: ignore[arg-type]
        claimed = pool.submit(taken, EventFeed("g"), impatient)
        until(looking, waits(relation=part))
        locked = pool.submit(other.execute, lock.format("pgmb.dispatched"))  # type: ignore[arg-type]
        until(looking, waits(other))
        # Here the claim first meets the other transaction, which waits for it.
        first.rollback()
        locked.result()
        other.rollback()
        assert len(claimed.result()) == 1
        until(looking, "select deadlocks = 1 from pg_stat_database where datname = current_database()")
