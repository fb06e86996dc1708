"""Copies and reports as the downstream of a tube: find the ids in them that may be gone at the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, MergeRefused, Refused
from airflow_pgchange.feeds.connections import both
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.keys import Key, value
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.reading import check_whole
from airflow_pgchange.feeds.table_names import table_parts
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.results.target import Target, look_up
from airflow_pgchange.tubes.control_pods import Control
from airflow_pgchange.tubes.table_ids import HeldIds, Ids, absent, key_types

SHARD = "shard"
TRUE = sql.SQL("true")


@dataclass(frozen=True)
class TableDownstream:
    """Returns the ids that a copy holds, but that its source table lacks or for which the tube's predicate is false.

    In ``table``, ``{tube}`` and ``{table}`` stand for the names of the tube and of the source table, without its
    schema. ``key`` is the copy's column of ids, or the list of its columns; the default is the names of the source's
    columns. A shared copy has a column ``shard``, as ``Job.mirror`` keeps it. The predicate runs with the rights of the
    source table's owner. The owner grants ``execute`` on it to the source's role.

    If ``table`` has no ``{table}`` and several tables are attached under one shard, it is a report that joins all of
    them. After a truncate of one table, the ids of the other tables are returned, too. The report may have to change for
    them, because it was computed with the truncated rows.

    Raises Refused for a control pod whose type a user has defined, and if the table is not attached or has no copy.
    Raises InvalidArgument if a copy cannot tell the rows of two tables apart. Raises PermissionDenied if row security
    hides rows of the source, or if ``table``, filled in, names a table that is no copy (``Attached.copy_in``).
    """

    results: str = field(repr=False)
    source: str = field(repr=False)
    feed: TubeFeed
    table: str
    key: KeyNames | None = None

    def __call__(self, control: Control) -> Iterator[Key]:
        if control.type not in ("backfill_end", "truncate"):
            raise Refused(f"a table cannot process control pods of type {control.type!r}")
        with translated(), both(self.results, self.source) as (results, source):
            attached, others = self._attached(source, control)
            copy = attached.copy_in(results, self.table)
            names = attached.key if self.key is None else names_of(self.key)
            target = _looked_up(results, copy)
            beside = [other for other in others if other.shard == attached.shard]
            shares = attached.shared if "{table}" in self.table else len(beside) < len(others)
            is_shared = shares or target.is_of_shards(SHARD, names)
            self._check(target, names, is_shared)
            types = key_types(source, attached)
            held = HeldIds.of(results, copy, names, types)
            of_shard = _compared(SHARD, "=", attached.shard) if is_shared else TRUE
            for ids in held.pages(of_shard):
                yield from _keys(absent(source, attached, ids, held.kind), types)
            for other in beside if control.type == "truncate" else ():
                check_whole(source, other.table)
                for ids in HeldIds.of(source, other.table, other.key, types).pages(TRUE):
                    missing = held.lacking(ids, of_shard)
                    yield from _keys(absent(source, attached, missing, held.kind), types)

    def _attached(self, source: psycopg.Connection[Any], control: Control) -> tuple[Attached, list[Attached]]:
        """Return the table that a control pod names, and the other tables whose rows are in the same copy or report."""
        every = Attached.all(self.feed.tube, ask(source, TubeFeed(self.feed.tube).attached()))
        try:
            parts = table_parts(control.table)
        except InvalidArgument as error:
            raise Refused(str(error)) from error
        attached = next((each for each in every if each.parts == parts), None)
        if attached is None:
            raise Refused(
                f"no table {control.table} is attached to tube {self.feed.tube}, so the rows of its copy stay. Attach "
                f"the table again, or under its current name, and backfill it"
            )
        return attached, [] if "{table}" in self.table else [each for each in every if each is not attached]

    def _check(self, copy: Target, key: Sequence[str], is_shared: bool) -> None:
        for name in key:
            if name not in copy.columns:
                raise InvalidArgument(f"{copy.name} has no column {name}: name its column of ids with key=")
        if is_shared:
            copy.check_shards(SHARD, key)


def _looked_up(results: psycopg.Connection[Any], copy: str) -> Target:
    try:
        return look_up(results, copy)
    except MergeRefused as error:
        raise Refused(f"there is no copy {copy} from which to delete rows") from error


def _compared(column: str, operator: str, value: int) -> sql.Composed:
    return sql.SQL("{} " + operator + " {}").format(sql.Identifier(column), value)


def _keys(ids: Ids, types: Sequence[str]) -> Iterator[Key]:
    return (value(id_, types) for id_ in ids)
