"""Message queues from Python: posting, asking and waiting for the answer, trying again, clearing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.asking import ask
from airflow_pgchange.feeds.calls import call, select
from airflow_pgchange.feeds.errors import InvalidArgument, translated

Texts = Mapping[str, str | None]
"""What an hstore holds."""
REPLY_TO, IN_REPLY_TO = "reply_to", "in_reply_to"
"""The properties by which a request names the queue of its answer, and an answer its request."""


def as_hstore(values: Texts) -> str:
    """A mapping of texts or None as PostgreSQL reads an hstore. Raises InvalidArgument for anything else."""
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, str | None):
            raise InvalidArgument(
                f"a message has texts or None by name, not {key!r}: {value!r}: make it a text"
            )
    return ", ".join(
        f"{_quoted(key)}=>{'NULL' if value is None else _quoted(value)}" for key, value in values.items()
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Message:
    """What is posted. ``after``: the iids of messages that must be received before it. It is delivered after ``delay``,
    and not once ``lifetime`` has passed."""

    data: Texts
    properties: Texts | None = None
    headers: Texts | None = None
    after: Sequence[str] = ()
    delay: timedelta | None = None
    lifetime: timedelta | None = None

    def stored_headers(self) -> Texts | None:
        if not self.after:
            return self.headers
        return {**(self.headers or {}), "consume_after": "{" + ",".join(self.after) + "}"}


def post(connection: psycopg.Connection[Any], queue: str, message: Message) -> str:
    """Post a message to a queue, in the transaction of ``connection``; returns its iid."""
    at = "(pg_catalog.clock_timestamp() operator(pg_catalog.+) {}::pg_catalog.interval)::pg_catalog.timestamp"
    times = [sql.SQL(at).format(value) for value in (message.delay, message.lifetime)]
    given = [message.data, message.stored_headers(), message.properties]
    query = sql.SQL("select mbus.post({})").format(
        sql.SQL(", ").join(
            [
                sql.Literal(queue),
                *(sql.Literal(None if one is None else as_hstore(one)) for one in given),
                *times,
            ]
        )
    )
    return str(ask(connection, query))


def try_again(
    connection: psycopg.Connection[Any], iid: str, after: timedelta, error: str | None = None
) -> int:
    """Put a message back that this transaction received, to come again after a time under its iid.

    Its property ``tries`` counts, ``error`` says what it failed on. Returns which try the next one is.
    """
    return int(ask(connection, select("mbus.try_again", iid, after, error)))


def answer(
    connection: psycopg.Connection[Any], iid: str, properties: Texts | None, data: Texts
) -> str | None:
    """Post the answer to a request, given its iid and properties; None where it wants none."""
    queue = (properties or {}).get(REPLY_TO)
    return None if queue is None else post(connection, queue, Message(data, {IN_REPLY_TO: iid}))


def clear(connection: psycopg.Connection[Any], names: Sequence[str] | None = None) -> dict[str, int]:
    """Delete from queues what expired, what no selector matches and what everybody has received, each in a transaction of
    its own; None: from all. Returns about how many messages are left in each."""
    with translated():
        known = [
            row[0] for row in connection.execute("select qname from mbus.queue order by qname").fetchall()
        ]
    if unknown := set(names or ()) - set(known):
        raise InvalidArgument(f"there is no queue {', '.join(sorted(unknown))}: mbus.queue lists them")
    left = {}
    for queue in known if names is None else names:
        ask(connection, sql.SQL("select {}").format(call(f"mbus.clear_queue_{queue}")))
        left[queue] = int(ask(connection, select("mbus.estimated_messages", queue)))
    return left
