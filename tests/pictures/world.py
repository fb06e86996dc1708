"""The databases that the pictures show: every kind of feed, and consumers in every state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg

from airflow_pgchange import tubes
from airflow_pgchange.admin import manual_operations, schema
from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    Feed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.messages import (
    RollBack,
    Saga,
    Step,
    TryAgain,
    create_saga_queues,
    handle_saga,
    start_saga,
)
from airflow_pgchange.messages.saga_handling import Answer
from demo import flights
from demo.postgres import Cluster
from tests import events, queues
from tests.event_keeping import drop_all, maintain

Connection = psycopg.Connection[Any]

FLIGHTS = 60_990
DELAYS = CommitFeed("route_delay", 0)
AUDIT = CommitFeed("movement_audit", 0)
IN_ORDER = CommitFeed("punctuality", 0, in_order=True)
ELSEWHERE = CommitFeed("cluster_audit", 0)
MISFIT = (
    "insert into public.route_delay values ('UA', 'EWR', 'ORD', 1, 1, 0, 9223372036854775807 + 1::bigint, 0)"
)
"""A statement that fails a batch: the sum is too large for its column."""
TOUR = Saga(
    "tour",
    (
        Step("room", "rooms", "cancel_rooms"),
        Step("flight_there", "flights", "cancel_flights", after=("room",)),
        Step("flight_back", "flights", "cancel_flights", after=("room",)),
        Step("transfer_to_hotel", "transfers", "cancel_transfers", after=("flight_there",)),
        Step("transfer_from_hotel", "transfers", "cancel_transfers", after=("flight_back",)),
    ),
)
"""The saga of ``dags/tour_booking.py``."""
GROUPS = {
    "flights": ["public.flight.insert", "public.flight.update", "public.flight.delete"],
    "search": ["public.flight.update"],
    "statistics": ["public.flight.update"],
}
"""Groups of the event log with their topics. The first is that of ``dags/event_handlers.py``."""
IN_TURN = ("rooms", "flights", "flights", "transfers", "transfers", "tour_end")
"""The queues in which the messages of a tour become ready, one after another."""
TOURS: tuple[tuple[int, tuple[str, ...], dict[str, Answer]], ...] = (
    (7, IN_TURN, {}),
    (
        8,
        IN_TURN[:2],
        {
            "flight_there": RollBack("flight_there is booked up"),
            "flight_back": RollBack("flight_back is booked up"),
        },
    ),
    (
        9,
        IN_TURN[:3],
        {"flight_there": TryAgain("flight_there is in other hands", delay=timedelta(minutes=30))},
    ),
)
"""Tours: an id, the queues whose messages are handled, one after another, and the handlers' answers.

The first tour is booked, the second is compensated, and the third continues.
"""
RUN = "flight_delays/asset__2013-01-07T12%3A30%3A00%2B00%3A00/totals/-1"


class _Over(Exception):
    """Raised when the pictures are taken."""


@contextmanager
def made(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Create the databases, and yield their connection strings by Airflow connection.

    In the block some sessions are open: sessions that work, and sessions for which consumers wait.
    """
    databases = {name: _new(cluster, name) for name in ("airline", "catalogue")}
    airline = databases["airline"]
    with ExitStack() as held, psycopg.connect(airline, autocommit=True) as connection:
        connection.execute(flights.DDL)
        _topology(databases["catalogue"])
        _tubes(connection, airline)
        _events(held, connection, airline)
        _queues(connection)
        _sagas(held, connection, airline)
        _commits(held, connection, databases)
        yield databases


def _new(cluster: Cluster, name: str) -> str:
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(f"create database {name}")
    with psycopg.connect(cluster.conninfo(name), autocommit=True) as connection:
        schema.install(connection)
    return cluster.conninfo(name)


@contextmanager
def _at_work(feed: Feed, db: str, limit: int) -> Iterator[None]:
    """Yield a consumer transaction that is working on a batch."""
    with suppress(_Over), ConsumerTransaction(feed, db) as transaction:
        assert transaction.claim(limit)
        yield
        raise _Over


def _process(feed: Feed, db: str, limit: int, run: str | None = None) -> None:
    with ConsumerTransaction(feed, db, run=run) as transaction:
        assert transaction.claim(limit)
        transaction.ack()


def _fail(feed: Feed, db: str, limit: int, statement: str, times: int = 1, run: str = "") -> None:
    """Let a batch fail on a statement this number of times."""
    for number in range(times):
        with (
            suppress(psycopg.Error),
            ConsumerTransaction(feed, db, run=run and f"{run}/{number + 1}") as transaction,
        ):
            assert transaction.claim(limit)
            transaction.ack(lambda connection: connection.execute(statement))


def _give_up(feed: Feed, db: str, statement: str, reason: str, *, limit: int = 1, times: int = 1) -> None:
    """Make a dead letter of a batch that fails on a statement."""
    _fail(feed, db, limit, statement, times)
    with psycopg.connect(db, autocommit=True) as connection:
        manual_operations.skip_batch(connection, connection, feed, reason)


def _commits(held: ExitStack, connection: Connection, databases: dict[str, str]) -> None:
    airline = databases["airline"]
    connection.execute("select revision.track('public.movement', branch_id => '0')")
    _move(connection, 2_000)
    for feed in (DELAYS, AUDIT, IN_ORDER):
        _process(feed, airline, 900)
        _process(feed, airline, 2_000)
    with psycopg.connect(databases["catalogue"], autocommit=True) as other:
        other.execute("create table change (id bigint generated always as identity primary key)")
        other.execute("select revision.track('public.change', branch_id => '0')")
        other.execute("insert into change select from generate_series(1, 3)")
    with ConsumerTransaction(ELSEWHERE, airline, databases["catalogue"]) as transaction:
        assert transaction.claim(1)
        transaction.ack()
    _move(connection, 412)
    _give_up(AUDIT, airline, MISFIT, "the audit can do without it", limit=20, times=3)
    for number in range(3):
        _give_up(
            AUDIT,
            airline,
            f"select 1 / 0 from public.movement where flight > {number}",
            "attempt 3 of 3",
            limit=5,
        )
    _fail(DELAYS, airline, 412, MISFIT, times=4, run=RUN)
    report = held.enter_context(psycopg.connect(airline, application_name="monthly_report"))
    report.execute("select pg_current_xact_id()")
    _move(connection, 506)
    _process(AUDIT, airline, 640)
    held.enter_context(_at_work(AUDIT, airline, 200))


def _move(connection: Connection, count: int) -> None:
    """Write movements. Each is a commit of the trunk."""
    connection.execute(
        "insert into public.movement (kind, flight_date, carrier, flight, origin, dest, at, delay) "
        "select (array['departure', 'arrival'])[1 + n %% 2], '2013-01-01', (array['UA', 'AA', 'B6', 'DL'])[1 + n %% 4], "
        "1000 + n %% 700, (array['EWR', 'JFK', 'LGA'])[1 + n %% 3], (array['ORD', 'ATL', 'BOS'])[1 + n %% 3], "
        "timestamp '2013-01-01' + n * interval '1 min', n %% 40 - 8 from generate_series(1, %s) as n",
        [count],
    )


def _tubes(connection: Connection, airline: str) -> None:
    connection.execute(
        "insert into public.flight (flight_date, carrier, flight, origin, dest, scheduled) "
        "select '2013-01-01', 'UA', n, 'EWR', 'ORD', timestamp '2013-01-01' + n * interval '1 min' "
        "from generate_series(1, %s) as n",
        [FLIGHTS],
    )
    connection.execute("analyze public.flight")
    tubes.ensure(connection, "copies", 2)
    tubes.attach(connection, "copies", "public.flight", shard=0)
    tubes.attach(connection, "copies", "public.movement", shard=1)
    _move(connection, 50)
    for first in range(0, 2_000, 100):
        connection.execute(
            "update public.flight set departure_delay = 4 where id between %s and %s", [first, first + 99]
        )
    for worker, limit in ((0, 200), (1, 2_000)):
        _process(TubeFeed("copies", worker, 2), airline, limit)
    tubes.ensure(connection, "search")
    tubes.attach(connection, "search", "public.flight", shard=0)
    _backfill(connection, "copies", "public.movement", chunks=2)
    _backfill(connection, "search", "public.flight", chunks=2)
    connection.execute("select tube.backfill_pause(max(id)) from tube.backfills()")
    _backfill(connection, "copies", "public.flight", chunks=36)


def _backfill(connection: Connection, tube: str, table: str, chunks: int) -> None:
    """Carry out the first chunks of a backfill."""
    ((number,),) = connection.execute(
        "select tube.backfill_begin(%s, %s, null, null, 1000)", [tube, table]
    ).fetchall()
    for _ in range(chunks):
        connection.execute("select tube.backfill_chunk(%s)", [number])


def _events(held: ExitStack, connection: Connection, airline: str) -> None:
    for table in ("pgmb.events", "pgmb.dispatched"):
        drop_all(connection, table)
    # Publish the events as if the event log had existed for two hours.
    for minutes in (120, 60, 0):
        maintain(connection, f"-{minutes} min")
    for group, topics in GROUPS.items():
        for topic in topics:
            events.subscribe(connection, group, events.TOPICAL, {"topic": topic})
    for minutes, count in ((95, 700), (42, 420), (0, 80)):
        events.publish(connection, *["public.flight.update"] * count)
        events.poll_all(connection)
        if minutes:
            # Let the dispatch look as old as its events: its id contains its time.
            connection.execute(
                "update pgmb.dispatched set id = left(pgmb.create_event_id(now() - %s * interval '1 min', 0), 15) "
                "|| right(id, 9) where pgmb.extract_date_from_event_id(id) > now() - interval '10 min'",
                [minutes],
            )
    _process(EventFeed("search"), airline, 2_000)
    _process(EventFeed("flights"), airline, 900)
    reader = held.enter_context(psycopg.connect(airline, autocommit=True, application_name="statistics"))
    assert events.read(reader, "statistics", 1, peek=False)


def _queues(connection: Connection) -> None:
    queues.make(connection, "gates", parts=4)
    queues.consumer(connection, "displays", "(t.properties->'kind') = 'change'", queue="gates")
    first = queues.fill(connection, range(120), "gates")[0]
    for number in range(4):
        queues.post(connection, number, "gates", delay="20 min", kind="change")
    queues.post(connection, 5, "gates", after=[first], kind="change")
    connection.execute("select mbus.post_dmq('n=>6', iid => mbus.get_iid('gates'))")


def _sagas(held: ExitStack, connection: Connection, airline: str) -> None:
    create_saga_queues(connection, TOUR)
    for tour, queues_in_turn, answers in TOURS:
        start_saga(connection, TOUR, {"tour_id": str(tour)})
        for queue in queues_in_turn:
            _answer(airline, queue, answers)
    held.enter_context(_at_work(QueueFeed("transfers"), airline, 1))


def _answer(airline: str, queue: str, answers: dict[str, Answer]) -> None:
    """Answer the next message of a saga in a queue with the answer for its step."""
    with ConsumerTransaction(QueueFeed(queue), airline) as transaction:
        assert transaction.claim(1), queue
        (change,) = transaction.changes()
        transaction.ack(lambda kept: handle_saga(kept, change, lambda work, _: answers.get(work.step or "")))


def carry_on(airline: str) -> None:
    """Carry out one more chunk of the backfill that is running."""
    with psycopg.connect(airline, autocommit=True) as connection:
        connection.execute("select tube.backfill_chunk(id) from tube.backfills() where state = 'running'")


def _topology(catalogue: str) -> None:
    with psycopg.connect(catalogue, autocommit=True) as connection:
        for replicaset, instances in (("r1", 3), ("r2", 2), ("r3", 3)):
            connection.execute("select topology.add_replicaset(%s)", [replicaset])
            for number in range(1, instances + 1):
                connection.execute(
                    "select topology.add_instance(%s, %s, %s)",
                    [f"{replicaset}-i{number}", replicaset, f"10.0.{replicaset[1]}.{number}:5432"],
                )
            connection.execute("select topology.set_master(%s, %s)", [replicaset, f"{replicaset}-i1"])
        connection.execute(
            "select topology.assign_buckets('default', 0, 999, 'r1'), "
            "topology.assign_buckets('default', 1000, 1999, 'r2'), "
            "topology.assign_buckets('default', 2000, 2999, 'r3')"
        )
        _process(TopologyFeed("masters"), catalogue, 100)
        connection.execute("select topology.move_buckets('default', 600, 799, 'copying', 'r3')")
        connection.execute("select topology.set_state('r2-i1', 'Offline')")
