"""Making tubes, attaching tables to them, and touching what a query returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.feeds.tables import found, table_identifier
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached import Attached


def ensure(
    connection: psycopg.Connection[Any],
    tube: str,
    workers: int | None = None,
    predicate: str | None = None,
    key: Sequence[str] | None = None,
) -> None:
    """Make a tube in the current schema, or change what is given of one that is there.

    ``predicate`` is SQL over a row that says whether touching it counts; an empty one takes it away.
    ``key``: the types of the columns of its ids, by default ``["bigint"]``, which are integers of any size. Ids of other
    types, such as ``["uuid"]`` or ``["text", "bigint"]``, travel as text.
    """
    query = sql.SQL("select tube.tube_ensure_exists({}, {}, {}, {}::regtype[])")
    ask(connection, query.format(tube, workers, predicate, None if key is None else list(key)))


def key_types(
    connection: psycopg.Connection[Any], tube: str, table: str, columns: KeyNames | None
) -> list[str] | None:
    """Return the types that the ids of a new tube have if its first table has them in ``columns``, by default its primary
    key; None if there is such a tube already."""
    if ask(connection, sql.SQL("select exists (select from tube.tube where name = {})").format(tube)):
        return None
    query = sql.SQL(
        "select pg_catalog.to_jsonb(pgchange.key_types(t, coalesce({}::name[], pgchange.primary_key(t)))::text[]) "
        "from (select {}::regclass) as q(t)"
    )
    with found(table):
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
    """Let a table touch a tube, from now on. Twice does nothing.

    ``shard`` is by default the number at the end of the name of the table's schema. ``key`` is the column, or the list of
    the columns, of which no two rows have the same values: by default the primary key. ``group_by`` names columns
    instead of which several rows have the same values, such as the order of each of its lines. Raises InvalidArgument
    for a table that is not there, UnknownConsumer for a tube that is not, Refused for a table that cannot be attached.
    """
    name = table_identifier(table).as_string(None)
    query = sql.SQL("select tube.tube_table_ensure_attached({}, {}::regclass, {}, {}::name[], {}::name[])")
    with found(table):
        ask(connection, query.format(tube, name, shard, _listed(key), _listed(group_by)))


def _listed(names: KeyNames | None) -> list[str] | None:
    return None if names is None else list(names_of(names))


def touch(
    connection: psycopg.Connection[Any], tubes: Sequence[str], query: str, shard: int, op: str = "T"
) -> None:
    """Touch the ids that ``query`` returns as its first column, in each of the tubes; in the order in which they come.

    The query is SQL that runs with the rights of this connection. ``op``: I, U, D, T, or B for a backfill. Raises
    InvalidArgument where no tube is named, or one whose name has a comma in it, and where there is no query;
    UnknownConsumer for a tube that is not there, Refused for another op, and psycopg's own error where the query fails.
    """
    if not tubes or not all(tubes):
        raise InvalidArgument("name the tube to touch, or several")
    if not query or not query.strip("; \r\n\t"):
        raise InvalidArgument("give the query that returns the ids to touch")
    if odd := [tube for tube in tubes if set(tube) & set(",{}")]:
        raise InvalidArgument(
            f"{odd[0]!r}: a tube with a comma or a brace in its name cannot be touched by a query"
        )
    ask(connection, select("tube.tube_pods_insert", ",".join(tubes), query, shard, op))


def attached(connection: psycopg.Connection[Any], tube: str) -> list[str]:
    """The tables that touch a tube, as ``schema.table``. Raises UnknownConsumer where there is no such tube."""
    return [each.table for each in Attached.all(tube, ask(connection, TubeFeed(tube).attached()))]
