"""Create tubes, attach tables to them, and touch the ids that a query returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.feeds.table_names import requires_table, table_identifier
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached_tables import Attached


def ensure(
    connection: psycopg.Connection[Any],
    tube: str,
    workers: int | None = None,
    predicate: str | None = None,
    key: Sequence[str] | None = None,
) -> None:
    """Create a tube in the current schema, or change the given settings of an existing tube.

    ``predicate`` is an SQL condition on a row: rows for which it is false are not touched. An empty text removes it.
    ``key`` is the types of the columns of the ids, by default ``["bigint"]``, which stands for integers of any size.
    Ids of other types, such as ``["uuid"]`` or ``["text", "bigint"]``, are kept as text.
    """
    query = sql.SQL("select tube.tube_ensure_exists({}, {}, {}, {}::regtype[])")
    ask(connection, query.format(tube, workers, predicate, None if key is None else list(key)))


def key_types(
    connection: psycopg.Connection[Any], tube: str, table: str, columns: KeyNames | None
) -> list[str] | None:
    """Return the types of the ids of a new tube, given its first table and the ``columns`` with the ids, by default its
    primary key. None if the tube exists already."""
    if ask(connection, sql.SQL("select exists (select from tube.tube where name = {})").format(tube)):
        return None
    query = sql.SQL(
        "select pg_catalog.to_jsonb(pgchange.key_types(t, coalesce({}::name[], pgchange.primary_key(t)))::text[]) "
        "from (select {}::regclass) as q(t)"
    )
    with requires_table(table):
        types: list[str] = ask(
            connection, query.format(_listed(columns), table_identifier(table).as_string(None))
        )
    return types if types and all(types) else None


def attach(
    connection: psycopg.Connection[Any],
    tube: str,
    table: str,
    *,
    shard: int | None = None,
    key: KeyNames | None = None,
    group_by: KeyNames | None = None,
) -> None:
    """Attach a table to a tube: from now on its changes touch the tube. A second call changes nothing.

    ``shard`` is by default the number at the end of the name of the table's schema. ``key`` is the column, or the list
    of columns, with unique values: by default the primary key. ``group_by`` replaces it by columns whose values several
    rows share, such as the order of an order line. Raises InvalidArgument if the table does not exist, UnknownConsumer
    if the tube does not exist, and Refused if the table cannot be attached.
    """
    name = table_identifier(table).as_string(None)
    query = sql.SQL("select tube.tube_table_ensure_attached({}, {}::regclass, {}, {}::name[], {}::name[])")
    with requires_table(table):
        ask(connection, query.format(tube, name, shard, _listed(key), _listed(group_by)))


def _listed(names: KeyNames | None) -> list[str] | None:
    return None if names is None else list(names_of(names))


def touch(
    connection: psycopg.Connection[Any], tubes: Sequence[str], query: str, shard: int, op: str = "T"
) -> None:
    """Touch the ids in the first column of ``query``, in each of the tubes, in the order of the query.

    The query is SQL that runs with the rights of this connection. ``op``: I, U, D, T, or B for a backfill. Raises
    InvalidArgument without a tube or a query, and for a tube with a comma or brace in its name. Raises UnknownConsumer
    if a tube does not exist, Refused for another op, and psycopg's error if the query fails.
    """
    if not tubes or not all(tubes):
        raise InvalidArgument("tubes must have the name of at least one tube to touch")
    if not query or not query.strip("; \r\n\t"):
        raise InvalidArgument("query must be SQL that returns the ids to touch")
    if odd := [tube for tube in tubes if set(tube) & set(",{}")]:
        raise InvalidArgument(
            f"{odd[0]!r}: the ids of a query cannot touch a tube with a comma or a brace in its name"
        )
    ask(connection, select("tube.tube_pods_insert", ",".join(tubes), query, shard, op))


def attached(connection: psycopg.Connection[Any], tube: str) -> list[str]:
    """Return the tables that are attached to a tube, as ``schema.table``. Raises UnknownConsumer if the tube does not
    exist."""
    return [each.table for each in Attached.all(tube, ask(connection, TubeFeed(tube).attached()))]
