"""Short functions to post and to receive messages by SQL, for the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

BOUNDS = """
create table public.bounds (b integer);
create function public.bound(text) returns integer language plpgsql immutable as $$
begin
    return (select sum(b) from public.bounds);
end
$$;
"""
"""A function whose result depends on a table, although it is declared immutable.

A selector that calls it can fail first, and succeed later.
"""


def one(connection: Connection, query: str, *parameters: Any) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    return None if row is None else row[0]


def make(connection: Connection, *queues: str, parts: int = 4, roles: bool = False) -> None:
    for queue in queues or ("q",):
        connection.execute("select mbus.create_queue(%s, %s, %s)", [queue, parts, roles])


@contextmanager
def under_roles(connection: Connection) -> Iterator[Connection]:
    """Create the queues q and r under roles, and a consumer ``other`` of q. The roles are dropped at the end."""
    make(connection, "q", "r", roles=True)
    consumer(connection, "other")
    yield connection
    for queue in ("q", "r"):
        connection.execute("select mbus.drop_queue(%s)", [queue])


def consumer(connection: Connection, name: str, selector: str | None = None, queue: str = "q") -> None:
    connection.execute("select mbus.create_consumer(%s, %s, %s)", [name, queue, selector])


def post(
    connection: Connection,
    n: object,
    queue: str = "q",
    *,
    after: Sequence[str] = (),
    delay: str | None = None,
    expires: str | None = None,
    iid: str | None = None,
    kind: str | None = None,
) -> str:
    """Post a message {n => ...}, and return its iid. delay and expires are intervals from now."""
    return one(
        connection,
        "select mbus.post(%s, hstore('n', %s), case when %s <> '{}' then hstore('consume_after', %s) end, "
        "hstore('kind', %s), (clock_timestamp() + %s::interval)::timestamp, "
        "(clock_timestamp() + %s::interval)::timestamp, %s)",
        queue,
        str(n),
        "{" + ",".join(after) + "}",
        "{" + ",".join(after) + "}",
        kind,
        delay,
        expires,
        iid,
    )


def fill(connection: Connection, numbers: Sequence[object], queue: str = "q") -> list[str]:
    """Post many messages at once, and return their iids."""
    return one(
        connection,
        f"select mbus.postn_{queue}(array(select hstore('n', n) "
        "from unnest(%s::text[]) with ordinality as u(n, i) order by i))",
        [str(n) for n in numbers],
    )


def consume(connection: Connection, name: str = "default", queue: str = "q") -> str | None:
    """Receive the next message, and return its n; None if there is no message."""
    return one(connection, "select data -> 'n' from mbus.consume(%s, %s)", queue, name)


def consumen(connection: Connection, most: int, name: str = "default", queue: str = "q") -> list[str]:
    rows = connection.execute(f"select data -> 'n' from mbus.consumen_{queue}_by_{name}(%s)", [most])
    return [row[0] for row in rows.fetchall()]


def drain(connection: Connection, name: str = "default", queue: str = "q", most: int = 1000) -> list[str]:
    found: list[str] = []
    while some := consumen(connection, most, name, queue):
        found += some
    return found


def there(connection: Connection, queue: str = "q") -> list[str]:
    """Return the number n of each message in a queue."""
    rows = connection.execute(f"select data -> 'n' from mbus.\"qt${queue}\" order by id")
    return [row[0] for row in rows.fetchall()]


def take(connection: Connection, iid: str) -> str | None:
    return one(connection, "select (mbus.take(%s)).data -> 'n'", iid)
