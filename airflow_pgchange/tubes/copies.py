"""Tables that are copies or reports, as the downstream of a tube: the ids that they have to look at again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, MergeRefused, Refused
from airflow_pgchange.feeds.connections import both
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.feeds.reading import check_whole
from airflow_pgchange.feeds.tables import table_identifier, table_parts
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached import Attached
from airflow_pgchange.results.target import Target, look_up
from airflow_pgchange.tubes.control_pods import Control

SHARD = "shard"
LOOKED_AT = 10_000
"""Ids that are compared in one go."""

TRUE = sql.SQL("true")


@dataclass(frozen=True)
class TableDownstream:
    """Ids that a copy holds and its source table does not, or not any more as the tube's predicate wants it.

    In ``table`` ``{tube}`` and ``{table}`` stand for the names of the tube and of the source table, without its schema.
    ``key`` is the copy's column of ids, by default called as the source's. A copy of several tables' rows has a column
    ``shard``, as ``Job.mirror`` keeps it. The predicate runs with the rights of the source table's owner,
    who grants the source's role ``execute`` on it.

    If several tables touch the tube under one shard, a table without ``{table}`` in its name is a report of them all.
    Behind a truncate the ids that only the other tables have are then returned too, because without the truncated rows
    the report may have rows for them.

    Raises Refused for control pods that it can do nothing about: of a table that is not attached, or has no copy, and
    users' own. Raises InvalidArgument where two tables' rows in a copy cannot be told apart, PermissionDenied where row
    security hides rows of the source, or where what is filled in names a table that is no copy (``Attached.copy_in``).
    """

    results: str = field(repr=False)
    source: str = field(repr=False)
    feed: TubeFeed
    table: str
    key: str | None = None

    def __call__(self, control: Control) -> Iterator[int]:
        if control.type not in ("backfill_end", "truncate"):
            raise Refused(f"a table cannot do what control pods of type {control.type!r} ask for")
        with translated(), both(self.results, self.source) as (results, source):
            attached, others = self._attached(source, control)
            copy = attached.copy_in(results, self.table)
            key = self.key or attached.id_column
            target = _looked_up(results, copy)
            beside = [other for other in others if other.shard == attached.shard]
            shares = attached.shared if "{table}" in self.table else len(beside) < len(others)
            is_shared = shares or target.is_of_shards(SHARD, key)
            self._check(target, key, is_shared)
            of_shard = _compared(SHARD, "=", attached.shard) if is_shared else TRUE
            for ids in _pages(results, copy, key, of_shard):
                yield from _absent(source, attached, ids)
            for other in beside if control.type == "truncate" else ():
                check_whole(source, other.table)
                for ids in _pages(source, other.table, other.id_column, TRUE):
                    yield from _absent(source, attached, _new(results, copy, key, of_shard, ids))

    def _attached(self, source: psycopg.Connection[Any], control: Control) -> tuple[Attached, list[Attached]]:
        """Return the table that a control pod names, and the other tables whose rows are in the same copy or report."""
        every = Attached.all(self.feed.tube, ask(source, TubeFeed(self.feed.tube).attached()))
        try:
            parts = table_parts(control.table)
        except InvalidArgument as error:
            raise Refused(str(error)) from error
        found = next((each for each in every if each.parts == parts), None)
        if found is None:
            raise Refused(
                f"no table {control.table} is attached to tube {self.feed.tube}: what its copy held is there still; a "
                "backfill of the table, when it is attached again or under its name of today, puts that right"
            )
        return found, [] if "{table}" in self.table else [each for each in every if each is not found]

    def _check(self, copy: Target, key: str, is_shared: bool) -> None:
        if key not in copy.columns:
            raise InvalidArgument(f"{copy.name} has no column {key}: say what its column of ids is called")
        if is_shared:
            copy.check_shards(SHARD, key)


def _looked_up(results: psycopg.Connection[Any], copy: str) -> Target:
    try:
        return look_up(results, copy)
    except MergeRefused as error:
        raise Refused(f"there is no copy {copy}, which could give something up") from error


def _compared(column: str, operator: str, value: int) -> sql.Composed:
    return sql.SQL("{} " + operator + " {}").format(sql.Identifier(column), value)


def _pages(
    connection: psycopg.Connection[Any], table: str, key: str, where: sql.Composable
) -> Iterator[list[int]]:
    """Yield the ids in a table, in their order."""
    query = sql.SQL(
        "select distinct {key} from {table} where {where} and {after} order by {key} limit {limit}"
    )
    after: sql.Composable = sql.SQL("{} is not null").format(sql.Identifier(key))
    while True:
        page = query.format(
            key=sql.Identifier(key), table=table_identifier(table), where=where, after=after, limit=LOOKED_AT
        )
        ids = [held for (held,) in rows(connection, page)]
        if not ids:
            return
        yield ids
        after = _compared(key, ">", ids[-1])


def _new(
    results: psycopg.Connection[Any], copy: str, key: str, where: sql.Composable, ids: list[int]
) -> list[int]:
    """Return those of the ids that a copy does not hold."""
    query = sql.SQL(
        "select w.id from unnest({ids}::bigint[]) as w(id) "
        "where not exists (select from {copy} where {key} = w.id and {where})"
    ).format(ids=ids, copy=table_identifier(copy), key=sql.Identifier(key), where=where)
    return [new for (new,) in rows(results, query)]


def _absent(source: psycopg.Connection[Any], attached: Attached, ids: list[int]) -> list[int]:
    """Those of the ids that a copy of the table is not to hold."""
    query = sql.SQL(
        "select w.id from unnest({ids}::bigint[]) as w(id) "
        "where w.id not in (select tube.wanted({tube}, {table}::regclass, {ids}::bigint[]))"
    ).format(ids=ids, tube=attached.tube, table=table_identifier(attached.table).as_string(None))
    return [absent for (absent,) in rows(source, query)]
