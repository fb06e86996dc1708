"""Short functions to publish and dispatch events, and to read the partitions of the event log, for tests of its
maintenance."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg

from tests.tubes import one

Connection = psycopg.Connection[Any]


def lines(connection: Connection, query: str) -> list[str]:
    """Return the lines of text that a function of the event log, such as its maintenance, returns."""
    return [row[0] for row in connection.execute(query).fetchall()]


def maintain(connection: Connection, later: str = "0") -> list[str]:
    """Run the maintenance as if the clock were ahead by the interval ``later``. Return its report."""
    return lines(connection, f"select pgmb.maintain_log(now() + interval '{later}')")


def publish(connection: Connection, n: int = 1, topic: str = "t", at: str | None = None) -> list[str]:
    """Publish ``n`` events, now or at the time of an SQL expression, and return their ids."""
    number = "nextval('pgmb.event_seq')"
    given = f"pgmb.create_event_id({at}, {number})" if at else None
    columns, values = (
        ("id, topic, payload", f"{given}, %s, '{{}}'") if given else ("topic, payload", "%s, '{}'")
    )
    query = f"insert into pgmb.events ({columns}) select {values} from generate_series(1, %s) returning id"
    return [row[0] for row in connection.execute(query, [topic, n]).fetchall()]


def fill_default(connection: Connection, n: int, at: str) -> None:
    """Publish ``n`` events of 7 kB each for a time for which the log has no partition."""
    connection.execute("alter table pgmb.events_default alter column payload set storage plain")
    # Autovacuum could lock the tables. Operations that do not wait for locks would then be skipped.
    connection.execute("alter table pgmb.events_default set (autovacuum_enabled = off)")
    connection.execute(
        "insert into pgmb.events (id, topic, payload) "
        f"select pgmb.create_event_id({at}, g), 't', jsonb_build_object('x', repeat('x', 7000)) "
        "from generate_series(1, %s) as g",
        [n],
    )


def drop_all(connection: Connection, table: str = "pgmb.events") -> None:
    """Drop all partitions of a table except the default partition."""
    for name, _, _ in partitions(connection, table):
        connection.execute(f"drop table {name}")


def place(connection: Connection, later: str = "0") -> None:
    """Move scheduled events into the table for them, and due events back, until nothing is left to move."""
    while one(connection, f"select pgmb.place_scheduled(now() + interval '{later}')"):
        pass


def set_aside_and_due(connection: Connection, n: int = 1) -> list[str]:
    """Store ``n`` scheduled events that became due a second ago, and return their ids."""
    ids = connection.execute(
        "insert into pgmb.later (id, topic, payload) "
        "select pgmb.create_event_id(now() - interval '1 second', n), 't', '{}' from generate_series(1, %s) as n "
        "returning id",
        [n],
    )
    connection.execute("update pgmb.later_from set id = (select min(id) from pgmb.later)")
    return [row[0] for row in ids.fetchall()]


def subscribe(connection: Connection, group: str = "g", topic: str | None = None, **columns: Any) -> str:
    """Subscribe to one topic, or to all topics, and return the id of the subscription."""
    if topic is not None:
        columns |= {"conditions_sql": "s.params @> jsonb_build_object('topic', e.topic)"}
        columns |= {"params": psycopg.types.json.Jsonb({"topic": topic})}
    names = ", ".join(["group_id", *columns])
    places = ", ".join(["%s"] * (1 + len(columns)))
    query = f"insert into pgmb.subscriptions ({names}) values ({places}) returning id"
    return str(one(connection, query, group, *columns.values()))


def dispatch(connection: Connection) -> None:
    """Dispatch until no event waits."""
    while one(connection, "select more from pgmb.dispatch()"):
        pass


def read(connection: Connection, group: str = "g") -> list[str]:
    """Read the events of a group, move its cursor behind them, and return their ids in the order of reading."""
    rows = connection.execute(
        "select id, next_cursor from pgmb.read_next_events(%s, chunk_size => 100000)", [group]
    ).fetchall()
    cursor = rows[-1][1] if rows else None
    if cursor is not None:
        connection.execute("select pgmb.set_group_cursor(%s, %s, true)", [group, cursor])
    else:
        connection.execute("select pgmb.release_group_lock(%s)", [group])
    return [row[0] for row in rows]


def partitions(connection: Connection, table: str = "pgmb.events") -> list[tuple[Any, ...]]:
    """Return the partitions as tuples of name, start and end."""
    return connection.execute(
        "select partition_id::text, pgmb.extract_date_from_event_id(lower_bound), "
        "pgmb.extract_date_from_event_id(upper_bound) from pgmb.get_partitions_and_bounds(%s::regclass)",
        [table],
    ).fetchall()


def contiguous(connection: Connection, table: str = "pgmb.events") -> bool:
    """Whether each partition begins where the previous partition ends."""
    found = partitions(connection, table)
    return all(a[2] == b[1] for a, b in itertools.pairwise(found))


def configure(connection: Connection, **settings: str) -> None:
    """Change settings in one transaction."""
    with connection.transaction():
        for name, value in settings.items():
            connection.execute("update pgmb.config set value = %s where id = %s", [value, name])


def narrow(connection: Connection, ahead: str = "2 seconds") -> None:
    """Configure partitions of one second each, so that a test sees how partitions are created and dropped."""
    for table in ("pgmb.events", "pgmb.dispatched"):
        for name, _, _ in partitions(connection, table):
            connection.execute(f"drop table {name}")
    configure(
        connection,
        partition_interval="1 second",
        partition_retention_period="1 second",
        future_intervals_to_create=ahead,
    )


def kept(connection: Connection) -> list[str]:
    """Return the ids of all events, in the log or still scheduled, in order."""
    query = "select id from pgmb.events union all select id from pgmb.later order by id"
    return [row[0] for row in connection.execute(query).fetchall()]
