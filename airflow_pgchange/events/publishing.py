"""Publish events in the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events.event import Event, Row, event_id, id_of_microsecond, row_of
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.refused_statements import refusal_kept

COLUMNS = ("id", "topic", "payload", "metadata", "subscription_id")
REFUSALS = (
    psycopg.DataError,
    psycopg.IntegrityError,
    # Too large for jsonb. psycopg derives this from OperationalError, like a lost connection, but a retry does not help.
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)
"""Errors that the event itself causes, so that no retry helps."""


def publish(
    connection: psycopg.Connection[Any], events: Event | Iterable[Event], *, returning: bool = False
) -> list[str]:
    """Publish events in the connection's transaction, in order, all or none.

    They are dispatched after the commit; an event with ``at`` is dispatched once that time has come. With ``returning``,
    returns the ids in the same order, which may need one more round trip; else returns an empty list. Raises
    InvalidArgument for a payload that is not JSON or that PostgreSQL cannot store, and for an id that exists already.
    """
    rows = [row_of(event) for event in ([events] if isinstance(events, Event) else events)]
    if returning or any(row.event.id or row.event.at for row in rows):
        rows = with_ids(connection, rows)
    copy_rows(connection, rows)
    return [str(row.event.id) for row in rows] if returning else []


def with_ids(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> list[Row]:
    """Return the rows with ids. Generated ids use the server's clock and ascend in the order of the rows."""
    numbering = sql.SQL(
        "select array[(date_part('epoch', clock_timestamp()) * 1000000)::bigint] || "
        "array(select nextval('pgmb.event_seq') from generate_series(1, {}))"
    )
    now, *numbers = ask(connection, numbering.format(len(rows)))
    return [_with_id(row, now, number) for row, number in zip(rows, numbers, strict=True)]


def copy_rows(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> None:
    """Publish rows by COPY, which is faster than INSERT even for one row. Either all rows have ids or none has."""
    if not rows:
        return
    columns = COLUMNS if rows[0].event.id else COLUMNS[1:]
    command = sql.SQL("copy pgmb.events ({}) from stdin").format(_names(columns))
    with _explained(connection, command), connection.cursor() as cursor, cursor.copy(command) as copy:
        for row in rows:
            copy.write_row(_values(row, columns))


def insert_if_absent(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> None:
    """Publish rows that may be in the log already, after a commit whose outcome is unknown. Existing rows are skipped.

    Waits for a transaction that may still commit some of them. Raises InvalidArgument if a different event has the id of
    a row.
    """
    columns = zip(*(_values(row, COLUMNS) for row in rows), strict=True)
    lists = sql.SQL("{}::text[], {}::text[], {}::text[]::jsonb[], {}::text[]::jsonb[], {}::text[]").format(
        *(sql.Literal(list(values)) for values in columns)
    )
    query = sql.SQL("insert into pgmb.events ({}) select * from unnest({}) on conflict do nothing")
    with _explained(connection, query):
        if connection.execute(query.format(_names(COLUMNS), lists)).rowcount == len(rows):
            return
        others = ask(connection, sql.SQL("select pgmb.other_events({})").format(lists))
    if others:
        raise InvalidArgument(
            f"an event was refused: a different event has the same id ({', '.join(others)}): give it another id"
        )


def _with_id(row: Row, now: int, number: int) -> Row:
    event = row.event
    if event.id is not None:
        return row
    new_id = id_of_microsecond(now, number) if event.at is None else event_id(event.at, number)
    return replace(row, event=replace(event, id=new_id, at=None))


def _values(row: Row, columns: Sequence[str]) -> list[str | None]:
    values = [row.event.id, row.event.topic, row.payload, row.metadata, row.event.subscription_id]
    return values[-len(columns) :]


def _names(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


@contextmanager
def _explained(connection: psycopg.Connection[Any], query: sql.Composable) -> Iterator[None]:
    """Convert errors that an event causes, in PostgreSQL or while it is encoded, to InvalidArgument."""
    try:
        with translated(), refusal_kept(connection, query):
            yield
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"an event has text that the connection cannot send: {error}") from error
    except REFUSALS as error:
        detail = error.diag.message_detail or error.diag.context or ""
        raise InvalidArgument(
            f"an event was refused: {error.diag.message_primary or error} {detail}".strip()
        ) from error
