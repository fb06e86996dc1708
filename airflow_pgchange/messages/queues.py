"""Message queues: post messages, send requests and receive their answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds, seconds, shown, span
from airflow_pgchange.feeds.queries import ask, call, rows, select

log = logging.getLogger(__name__)

Texts = Mapping[str, str | None]
"""The contents of an hstore: a mapping of names to texts or None."""
DAY = timedelta(days=1)
REPLY_TO, REPLY_IID, IN_REPLY_TO = "reply_to", "reply_iid", "in_reply_to"
"""Properties of messages: a request names the queue and the iid of its answer, and an answer names its request."""

MANY_STEPS = 100
"""Maximum number of transactions in which one run of maintenance deletes messages of a queue."""
WORTHWHILE = 100
"""If a transaction deletes fewer messages than this, the run stops there. So its cost depends on what can be deleted."""

TEMPORARY = "temp."
"""The prefix of the names of temporary queues."""


def as_hstore(values: Texts) -> str:
    """Return a mapping of names to texts or None in the notation of hstore. Raises InvalidArgument for other values."""
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, str | None):
            raise InvalidArgument(
                f"a message is a mapping of names to texts or None, but has {key!r}: {value!r}: convert it to a text"
            )
    return ", ".join(
        f"{_quoted(key)}=>{'NULL' if value is None else _quoted(value)}" for key, value in values.items()
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Message:
    """A message to post.

    ``after`` are the iids of messages that must be received before this message. The message is delivered after ``delay``
    (seconds or a timedelta), and is no longer delivered when ``expiry`` has passed.
    """

    data: Texts
    properties: Texts | None = None
    after: Sequence[str] = ()
    delay: Seconds | None = None
    expiry: Seconds | None = None

    def stored_headers(self) -> Texts | None:
        if not self.after:
            return None
        if isinstance(self.after, str):
            raise InvalidArgument(
                f"`after` is a sequence of iids, not the text {self.after!r}: [{self.after!r}]"
            )
        return {"consume_after": "{" + ",".join(self.after) + "}"}


def post(
    connection: psycopg.Connection[Any], queue_name: str, message: Message, iid: str | None = None
) -> str:
    """Post a message to a queue, in the transaction of ``connection``. Return its iid, which is ``iid`` if given."""
    at = "(pg_catalog.clock_timestamp() operator(pg_catalog.+) {}::pg_catalog.interval)::pg_catalog.timestamp"
    texts = (message.data, message.stored_headers(), message.properties)
    arguments: list[sql.Composable] = [
        sql.Literal(queue_name),
        *(sql.Literal(None if values is None else as_hstore(values)) for values in texts),
        *(
            sql.SQL(at).format(time)
            for time in (span("delay", message.delay), span("expiry", message.expiry))
        ),
        sql.Literal(iid),
    ]
    return str(ask(connection, sql.SQL("select mbus.post({})").format(sql.SQL(", ").join(arguments))))


def temporary_queue(connection: psycopg.Connection[Any]) -> str:
    """Create a queue that exists as long as the session of ``connection``. A pooler must not share this session."""
    return str(ask(connection, select("mbus.create_temporary_queue")))


def new_iid(connection: psycopg.Connection[Any], queue_name: str) -> str:
    """Return a new iid for a message that will be posted to a queue."""
    return str(ask(connection, select("mbus.get_iid", queue_name)))


def request(
    connection: psycopg.Connection[Any],
    queue_name: str,
    message: Message,
    reply_queue: str,
    reply_iid: str | None = None,
) -> str:
    """Post a message that requests an answer in a queue. Return the message's iid.

    In a temporary queue, ``consume`` receives the answer. In any other queue the answer has the iid ``reply_iid`` and
    ``take`` receives it; no consumer may consume from that queue.
    """
    reply = {REPLY_TO: reply_queue} if reply_iid is None else {REPLY_TO: reply_queue, REPLY_IID: reply_iid}
    return post(connection, queue_name, replace(message, properties={**(message.properties or {}), **reply}))


def answer(
    connection: psycopg.Connection[Any],
    iid: str,
    properties: Texts | None,
    data: Texts,
    *,
    expiry: Seconds | None = DAY,
) -> str | None:
    """Post the answer to a request, given the request's iid and properties. Return the answer's iid.

    Returns None if the request wants no answer, has an answer already, or names a temporary queue that is gone. These are
    no errors, because the handler cannot do anything about them. The answer is posted to the queue that the request
    names, with the rights of ``connection``. An answer that nobody takes is deleted after its ``expiry``.
    """
    requested = properties or {}
    queue = requested.get(REPLY_TO)
    if queue is None:
        return None
    try:
        with connection.transaction():
            message = Message(data, {IN_REPLY_TO: iid}, expiry=expiry)
            return post(connection, queue, message, requested.get(REPLY_IID))
    except psycopg.errors.UniqueViolation:
        return None
    except psycopg.errors.UndefinedObject:
        if queue.startswith(TEMPORARY):
            return None
        raise


def take(connection: psycopg.Connection[Any], iid: str) -> dict[str, str | None] | None:
    """Receive a message by its iid, and remove it for all consumers of its queue. Return its data; None if there is no
    such message."""
    return _data(connection, call("mbus.take", iid))


def consume(connection: psycopg.Connection[Any], queue_name: str) -> dict[str, str | None] | None:
    """Receive a message of a queue, which may be temporary. Return its data, or None if there is no message."""
    return _data(connection, call("mbus.consume", queue_name))


def _data(connection: psycopg.Connection[Any], message: sql.Composed) -> dict[str, str | None] | None:
    # Cast hstore to json: the extension hstore may be in any schema, so its operators are not in the search path.
    data: dict[str, str | None] | None = ask(
        connection,
        sql.SQL("select m.data::pg_catalog.json from {} as m where m.id is not null").format(message),
    )
    return data


def look_after(connection: psycopg.Connection[Any]) -> list[str]:
    """Delete received and expired messages, and temporary queues whose sessions ended. Return a line for each queue.

    A transaction takes at most a second, whatever the backlog. A queue gets another one while there is much to delete.
    """
    lines: list[str] = []
    for (queue,) in rows(connection, "select qname from mbus.queue order by qname"):
        try:
            deleted = _deleted(connection, queue)
        except psycopg.errors.LockNotAvailable:
            lines.append(f"postponed queue {queue}: it is being changed")
            continue
        if deleted:
            lines.append(f"queue {queue}: deleted {deleted} messages that were received or expired")
    rows(connection, "select mbus.clear_tempq()")
    return lines


def _deleted(connection: psycopg.Connection[Any], queue: str) -> int:
    total = 0
    for _ in range(MANY_STEPS):
        deleted = ask(connection, select("mbus.maintain_queue", queue))
        total += deleted
        if deleted < WORTHWHILE:
            break
        log.info("queue %s: deleted %d messages so far", queue, total)
    return total


def roll_back_overdue(connection: psycopg.Connection[Any]) -> list[str]:
    """Roll back the sagas that missed their deadline. Return a line for each."""
    return [f"sagas: {line}" for (line,) in rows(connection, "select mbus.roll_back_overdue()")]


def stuck_sagas(connection: psycopg.Connection[Any]) -> list[str]:
    """Return a line for each saga that needs a person, among the sagas whose queues this role may use."""
    return [line for (line,) in rows(connection, "select mbus.stuck_sagas()")]


def forget_sagas(connection: psycopg.Connection[Any], retention: Seconds) -> list[str]:
    """Delete sagas that ended longer ago than ``retention``. Return a line with the count. Raises InvalidArgument."""
    age = timedelta(seconds=seconds("saga_retention", retention))
    forgotten = ask(connection, sql.SQL("select mbus.forget_sagas({})").format(age))
    return [f"sagas: forgot {forgotten} that ended more than {shown(age)} ago"] if forgotten else []
