"""The changes in a filled database, and the work on them."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from airflow_pgchange import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
    admin,
)
from airflow_pgchange.events import EventHandlers, Handler
from airflow_pgchange.messages import handle_saga, start_saga

from .consumers import STATES, Connection, Failed, begin, expect, record, returned
from .objects import TOUR, TRACKED


def write_commits(connection: Connection, first: int) -> None:
    for table, values in {
        "payment": "n, 1",
        "visit": "gen_random_uuid()",
        "reading": "gen_random_uuid(), n",
    }.items():
        key = "sensor, no" if table == "reading" else "id"
        ids = returned(
            connection,
            f"insert into {table} select {values} from generate_series({first}, {first + 9}) as n returning {key}",
        )
        expect(connection, table, [(str(n[0]), n[1]) if isinstance(n, tuple) else n for n in ids])


def work_commits(connection: Connection, db: str) -> None:
    write_commits(connection, 1)
    for state in STATES:
        begin(connection, db, CommitFeed(state, 1), "payment", state)
    for branch, table in enumerate(TRACKED[1:], start=2):
        for state in ("partly", "leased"):
            begin(connection, db, CommitFeed(state, branch), table, state)
    begin(connection, db, CommitFeed("in order", 1, in_order=True), "payment", "partly")
    connection.execute("select pgchange.limit_lag('commits:idle/1', '1 day', 1000)")
    connection.execute("insert into revision.branch (type) values ('stable')")
    connection.execute("select revision.note_gaps()")


def write_tubes(connection: Connection, first: int) -> None:
    # Each statement makes a pod, and a batch has whole pods.
    for start in range(first, first + 10, 2):
        ids = returned(
            connection,
            "insert into item select n, date '2024-01-01', n % 2 = 0 "
            f"from generate_series({start}, {start + 1}) as n returning id",
        )
        for tube in STATES:
            expect(connection, f"tube {tube}", ids)
        expect(connection, "tube picky", [n for n in ids if n % 2 == 0])
        ids = returned(connection, "insert into parcel select from generate_series(1, 2) returning id")
        expect(connection, "tube keyed", ids)


def work_tubes(connection: Connection, db: str) -> None:
    write_tubes(connection, 1)
    for state in STATES:
        begin(connection, db, TubeFeed(f"tube {state}"), f"tube {state}", state)
    for tube in ("picky", "keyed"):
        begin(connection, db, TubeFeed(f"tube {tube}"), f"tube {tube}", "partly")
    # The first of three chunks of a backfill.
    expect(connection, "tube filled", returned(connection, "select id from stock"))
    (number,) = returned(connection, "select tube.backfill_begin('tube filled', 'stock', 'day', null, 4)")
    connection.execute("select from tube.backfill_chunk(%s)", [number])
    begin(connection, db, TubeFeed("tube filled"), "tube filled", "partly")


def write_events(connection: Connection, first: int) -> None:
    connection.execute(
        "insert into pgmb.events (topic, payload) select case n % 5 when 0 then 'other' else 't' end, "
        f"jsonb_build_object('n', n) from generate_series({first}, {first + 9}) as n"
    )
    expect(connection, "events", [n for n in range(first, first + 10) if n % 5])
    connection.execute(f"insert into account select n, 'new' from generate_series({first}, {first + 2}) as n")


def work_events(connection: Connection, db: str) -> None:
    for group in (*STATES, "handled"):
        connection.execute(
            "insert into pgmb.subscriptions (group_id, conditions_sql, params) values (%s, %s, %s)",
            [group, "s.params @> jsonb_build_object('topic', e.topic)", Jsonb({"topic": "t"})],
        )
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql) values ('accounts', 'e.topic ~ $$account$$')"
    )
    write_events(connection, 1)
    while returned(connection, "select more from pgmb.dispatch()")[0]:
        pass
    for state in STATES:
        begin(connection, db, EventFeed(state), "events", state)
    begin(connection, db, EventFeed("accounts"), "accounts", "partly")
    # Its events are to be tried again after a second.
    EventHandlers("handled", [Handler("record", failing, retries=(1, 1))], db, poll_interval=0.01).run(
        "empty"
    )
    # These events are published, and not dispatched.
    write_events(connection, 11)


def failing(delivery: Any) -> None:
    raise Failed("the handler cannot handle this event")


def write_queues(connection: Connection, first: int) -> None:
    numbers = [str(n) for n in range(first, first + 10)]
    for queue in ("plain", "keyed", "watched"):
        connection.execute(
            "select mbus.post(%s, hstore('n', n), null, hstore('kind', (n::integer %% 3)::text)) "
            "from unnest(%s::text[]) as n",
            [queue, numbers],
        )
        expect(connection, queue, numbers)
    expect(connection, "even", [n for n in numbers if int(n) % 2 == 0])
    expect(connection, "copies", numbers)


def work_queues(connection: Connection, db: str) -> None:
    write_queues(connection, 1)
    for state in STATES:
        begin(connection, db, QueueFeed("plain", state), "plain", state)
    begin(connection, db, QueueFeed("plain", "even"), "even", "retried")
    begin(connection, db, QueueFeed("copies"), "copies", "registered")
    for queue in ("keyed", "watched"):
        begin(connection, db, QueueFeed(queue), queue, "partly")
    for _ in range(3):
        with connection.transaction():
            numbers = returned(connection, "select data -> 'n' from mbus.consume('plain')")
            record(connection, QueueFeed("plain").name, numbers)
    begin(connection, db, QueueFeed("plain"), "plain", "partly")
    for _ in range(3):
        with connection.transaction():
            start_saga(connection, TOUR, {"guest": "Ann"})
    handle_next(db, "rooms")


def handle_next(db: str, queue: str) -> list[str]:
    """Handle the next message of a saga, and return its outcome; nothing if the queue is empty."""
    outcomes: list[str] = []
    with ConsumerTransaction(QueueFeed(queue), db) as consumer:
        if consumer.claim(1) is not None:
            (change,) = consumer.changes()
            consumer.ack(lambda connection: outcomes.append(handle_saga(connection, change, note_step)))
    return outcomes


def note_step(done: Any, connection: Connection) -> None:
    record(connection, f"saga {done.saga}", [f"{done.kind} {done.step}"])


def write_topology(connection: Connection, first: int) -> None:
    before = returned(connection, "select concat(term, '/', index) from topology.log")
    for n in range(first, first + 2):
        connection.execute("select topology.add_replicaset(%s)", [f"r{n}"])
        connection.execute(
            "select topology.add_instance(%s, %s, %s)", [f"i{n}", f"r{n}", f"127.0.0.1:{4000 + n}"]
        )
        connection.execute("select topology.set_master(%s, %s)", [f"r{n}", f"i{n}"])
        connection.execute(
            "select topology.assign_buckets('default', %s, %s, %s)", [10 * n, 10 * n + 9, f"r{n}"]
        )
    after = returned(connection, "select concat(term, '/', index) from topology.log")
    expect(connection, "topology", set(after) - set(before))


def work_topology(connection: Connection, db: str) -> None:
    write_topology(connection, 1)
    for state in STATES:
        begin(connection, db, TopologyFeed(state), "topology", state)


def note(connection: Connection) -> None:
    """Note what watchers and samplers see, and maintain the database."""
    seen = {"kind": "commit", "ready": 2}
    connection.execute("select pgchange.note_watchers(%s)", [Jsonb([{**seen, "feed": "commits:idle/1"}])])
    connection.execute("select pgchange.note_samples(%s)", [Jsonb([{**seen, "consumer": "commits:idle/1"}])])
    admin.maintain(connection, width=1000)


FEEDS = {
    "pubsub": (write_commits, work_commits),
    "tube": (write_tubes, work_tubes),
    "pgmb": (write_events, work_events),
    "topology": (write_topology, work_topology),
    "mbus": (write_queues, work_queues),
}
"""For each system, how to write ten more changes from a number on, and how to begin the work of its consumers."""
