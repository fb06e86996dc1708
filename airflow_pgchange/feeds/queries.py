"""Build calls of our SQL functions as statements without parameters, and execute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, tuple_row
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import InvalidArgument, SchemaMissing
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.extensions import EXTENSIONS, advice, is_missing
from airflow_pgchange.feeds.refused_statements import refusal_kept
from airflow_pgchange.feeds.schemas import schema_in

Query = LiteralString | sql.SQL | sql.Composed


def call(function: str, *arguments: Any) -> sql.Composed:
    """Return ``schema.function(...)`` as an expression. A mapping among the arguments becomes jsonb."""
    return sql.SQL("{}({})").format(
        sql.Identifier(*function.split(".")), sql.SQL(", ").join(map(_literal, arguments))
    )


def select(function: str, *arguments: Any) -> sql.Composed:
    """Return ``select schema.function(...)``, which has one row with one column."""
    return sql.SQL("select {}").format(call(function, *arguments))


def together(queries: Sequence[sql.Composed]) -> sql.Composed:
    """Return one query for an array with the values of queries that return JSON. One statement costs less than many."""
    each = [sql.SQL("({})::jsonb").format(query) for query in queries]
    return sql.SQL("select array[{}]").format(sql.SQL(", ").join(each))


def ask(
    connection: psycopg.Connection[Any], query: Query, values: Sequence[Any] | Mapping[str, Any] | None = None
) -> Any:
    """Execute a query that returns one row with one column, and return its value; None if there is no row."""
    result = rows(connection, query, values)
    return result[0][0] if result else None


def ask_each(connection: psycopg.Connection[Any], *queries: Query) -> list[Any]:
    """Execute statements in one round trip, and return the value of each; None for a statement without a row."""
    query = sql.SQL("; ").join([q if isinstance(q, sql.Composable) else sql.SQL(q) for q in queries])
    with _explained(connection, query), connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(query)
        values = []
        for _ in queries:
            row = cursor.fetchone() if cursor.description else None
            values.append(None if row is None else row[0])
            cursor.nextset()
    return values


async def ask_all(
    connection: psycopg.AsyncConnection[Any], queries: Sequence[sql.Composed], **settings: str
) -> list[Any]:
    """Execute queries in one round trip, and return the value of each; None for a query without a row.

    All fail if one fails. ``settings`` apply only to these queries.
    """
    if not queries:
        return []
    set_local = sql.SQL("set local {} = {}")
    local = [set_local.format(sql.Identifier(name), value) for name, value in settings.items()]
    try:
        with translated():
            cursor = await connection.execute(sql.SQL("; ").join([*local, *queries]))
            for _ in local:
                cursor.nextset()
            values = []
            for _ in queries:
                row = await cursor.fetchone()
                values.append(None if row is None else row[0])
                cursor.nextset()
    except SchemaMissing as error:
        extension = _needed(connection.info, error)
        if extension is not None and await ask_all(connection, [is_missing(extension)]) == [True]:
            raise SchemaMissing(advice(extension)) from error
        raise
    return values


def rows(
    connection: psycopg.Connection[Any], query: Query, values: Sequence[Any] | Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """Execute a query and return its rows as tuples, whatever the row factory of a user's connection is."""
    with _explained(connection, query), connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(query, values).fetchall()


def records(
    connection: psycopg.Connection[Any], query: Query, values: Sequence[Any] | Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Execute a query and return its rows as dicts."""
    with _explained(connection, query), connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, values).fetchall()


@contextmanager
def warned(connection: psycopg.Connection[Any], warn: Callable[[str], None]) -> Iterator[None]:
    """Call ``warn`` with each warning that the server sends in the block."""

    def on_notice(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            warn(str(notice.message_primary))

    connection.add_notice_handler(on_notice)
    try:
        yield
    finally:
        connection.remove_notice_handler(on_notice)


@contextmanager
def _explained(connection: psycopg.Connection[Any], query: Query) -> Iterator[None]:
    """Turn psycopg's errors into ours.

    If a schema is missing because the server lacks an extension, the error says so. Raises InvalidArgument for a text
    that PostgreSQL cannot store, such as bytes of a command line that are not UTF-8.
    """
    try:
        with translated(), refusal_kept(connection, query):
            yield
    except UnicodeEncodeError as error:
        unfit = error.object[error.start : error.end]
        raise InvalidArgument(
            f"the database was not asked, as a text holds {unfit!a:.30}, which is no character: write it in UTF-8"
        ) from None
    except psycopg.DataError as error:
        # psycopg raises DataError also for an answer that it cannot read. Only the text distinguishes the two.
        if "cannot contain NUL" not in str(error):
            raise
        raise InvalidArgument(f"the database was not asked: {error}") from error
    except SchemaMissing as error:
        extension = _needed(connection.info, error)
        if extension is not None and ask(connection, is_missing(extension)):
            raise SchemaMissing(advice(extension)) from error
        raise


def _needed(session: psycopg.ConnectionInfo, error: SchemaMissing) -> str | None:
    """Return the extension that the missing schema needs, or None. Also None if the session cannot take a query now."""
    if session.transaction_status != TransactionStatus.IDLE:
        return None
    return EXTENSIONS.get(schema_in(str(error)) or "")


def _literal(argument: Any) -> sql.Literal:
    return sql.Literal(Jsonb(dict(argument)) if isinstance(argument, Mapping) else argument)
