"""Tables that are copies, as the downstream of a tube: what they hold and their source no longer has."""

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
from airflow_pgchange.feeds.tables import table_identifier, table_parts
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached import Attached
from airflow_pgchange.results.target import Target, look_up
from airflow_pgchange.tubes.control_pods import Control

SHARD = "shard"
LOOKED_AT = 10_000
"""Ids of a copy that are compared with the source in one go."""


@dataclass(frozen=True)
class TableDownstream:
    """Ids that a copy holds and its source table does not, or not any more as the tube's predicate wants it.

    In ``table`` ``{tube}`` and ``{table}`` stand for the names of the tube and of the source table, without its schema.
    ``key`` is the copy's column of ids, by default called as the source's. A copy of several tables' rows has a column
    ``shard``, as ``Job.mirror`` keeps it. The predicate runs with the rights of the source table's owner,
    who grants the source's role ``execute`` on it.

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
            attached, shares = self._attached(source, control)
            copy = attached.copy_in(results, self.table)
            key = self.key or attached.id_column
            target = _looked_up(results, copy)
            is_shared = shares or target.is_of_shards(SHARD, key)
            self._check(target, key, is_shared)
            for ids in self._held(results, copy, key, attached.shard if is_shared else None):
                yield from _absent(source, attached, ids)

    def _attached(self, source: psycopg.Connection[Any], control: Control) -> tuple[Attached, bool]:
        """The table that a control pod names, and whether its copy is of other tables' rows too."""
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
        if "{table}" in self.table:
            return found, found.shared
        others = [each for each in every if each is not found]
        for other in others:
            if other.shard == found.shard:
                raise InvalidArgument(
                    f"{found.table} and {other.table} both touch tube {self.feed.tube} under shard {found.shard}, so "
                    f"{self.table} cannot tell their rows apart: give each a copy of its own, as {{tube}}.{{table}} does"
                )
        return found, bool(others)

    def _check(self, copy: Target, key: str, is_shared: bool) -> None:
        if key not in copy.columns:
            raise InvalidArgument(f"{copy.name} has no column {key}: say what its column of ids is called")
        if is_shared:
            copy.check_shards(SHARD, key)

    def _held(
        self, results: psycopg.Connection[Any], copy: str, key: str, shard: int | None
    ) -> Iterator[list[int]]:
        query = sql.SQL("select {key} from {copy} where {shard} and {after} order by {key} limit {limit}")
        of_shard = sql.SQL("true") if shard is None else _compared(SHARD, "=", shard)
        after: sql.Composable = sql.SQL("true")
        while True:
            page = query.format(
                key=sql.Identifier(key),
                copy=table_identifier(copy),
                shard=of_shard,
                after=after,
                limit=LOOKED_AT,
            )
            ids = [held for (held,) in rows(results, page)]
            if not ids:
                return
            yield ids
            after = _compared(key, ">", ids[-1])


def _looked_up(results: psycopg.Connection[Any], copy: str) -> Target:
    try:
        return look_up(results, copy)
    except MergeRefused as error:
        raise Refused(f"there is no copy {copy}, which could give something up") from error


def _compared(column: str, operator: str, value: int) -> sql.Composed:
    return sql.SQL("{} " + operator + " {}").format(sql.Identifier(column), value)


def _absent(source: psycopg.Connection[Any], attached: Attached, ids: list[int]) -> list[int]:
    """Those of the ids that a copy of the table is not to hold."""
    query = sql.SQL(
        "select w.id from unnest({ids}::bigint[]) as w(id) "
        "where w.id not in (select tube.wanted({tube}, {table}::regclass, {ids}::bigint[]))"
    ).format(ids=ids, tube=attached.tube, table=table_identifier(attached.table).as_string(None))
    return [absent for (absent,) in rows(source, query)]
