"""The ids that a table holds: numbers, or the texts of keys of other types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.key_columns import KeyColumn, found_by, key_columns, parts
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.results.attached_tables import Attached

Ids = Sequence[int] | Sequence[str]
LOOKED_AT = 10_000
"""The number of ids that are compared by one query."""

COMMA = sql.SQL(", ")
# The settings under which dates and bytes have the same text as in ids.
_PINNED = """
select pg_catalog.set_config('datestyle', 'ISO, MDY', true), pg_catalog.set_config('timezone', 'UTC', true),
       pg_catalog.set_config('bytea_output', 'hex', true)
"""


@dataclass(frozen=True)
class HeldIds:
    """The ids in the ``columns`` of a table. ``kind`` is the SQL type of an array of ids: ``bigint[]`` or ``text[]``."""

    connection: psycopg.Connection[Any]
    table: str
    columns: tuple[KeyColumn, ...]
    kind: sql.SQL

    @classmethod
    def of(
        cls, connection: psycopg.Connection[Any], table: str, names: Sequence[str], types: Sequence[str]
    ) -> HeldIds:
        """Return the ids in the columns ``names``. ``types`` are the key types of the tube. The columns of a copy may
        have other types, such as text for a uuid."""
        is_bigint = tuple(types) == BIGINT
        columns = key_columns(connection, table, names, types if is_bigint else [None] * len(types))
        return cls(connection, table, columns, sql.SQL("bigint[]" if is_bigint else "text[]"))

    def pages(self, where: sql.Composable) -> Iterator[Ids]:
        """Yield the ids, in their order."""
        order = COMMA.join(sql.Identifier(column.name) for column in self.columns)
        query = sql.SQL(
            "select {shown} from (select distinct {order} from {table} where {where} and {after} order by {order} limit "
            "{limit}) as t order by {order}"
        )
        after: sql.Composable = sql.SQL(" and ").join(
            sql.SQL("{} is not null").format(sql.Identifier(column.name)) for column in self.columns
        )
        while True:
            page = query.format(
                shown=self._shown(),
                order=order,
                table=table_identifier(self.table),
                where=where,
                after=after,
                limit=LOOKED_AT,
            )
            ids = self._read(page)
            if not ids:
                return
            yield ids
            after = sql.SQL("({}) > ({})").format(order, self._values(ids[-1]))

    def lacking(self, ids: Ids, where: sql.Composable) -> Ids:
        """Return those of the ids that the table does not hold."""
        query = sql.SQL(
            "select w.id from unnest({ids}::{kind}) as w(id) "
            "where not exists (select from {table} as t where {found} and {where})"
        ).format(
            ids=list(ids),
            kind=self.kind,
            table=table_identifier(self.table),
            found=found_by("t", self.columns, self._parts("w.id")),
            where=where,
        )
        return [id_ for (id_,) in rows(self.connection, query)]

    def _read(self, query: sql.Composed) -> Ids:
        if self.columns[0].type is None:
            return [id_ for (id_,) in rows(self.connection, query)]
        with self.connection.transaction():
            self.connection.execute(_PINNED)
            return [id_ for (id_,) in rows(self.connection, query)]

    def _shown(self) -> sql.Composed:
        """Return the SQL expression of a row's id."""
        shown = [column.shown("t") for column in self.columns]
        return (
            shown[0] if len(shown) == 1 else sql.SQL("array[{}]::pg_catalog.text").format(COMMA.join(shown))
        )

    def _values(self, id_: int | str) -> sql.Composed:
        """Return SQL expressions for the values of an id's columns."""
        if self.columns[0].type is None:
            return sql.SQL("{}").format(id_)
        several = len(self.columns) > 1
        text = sql.SQL("{}::pg_catalog.text[]" if several else "{}").format(id_).as_string(None)
        texts = parts(f"({text})", len(self.columns))
        return COMMA.join(column.value(text) for column, text in zip(self.columns, texts, strict=True))

    def _parts(self, id_: str) -> list[sql.Composable]:
        several = len(self.columns) > 1
        return parts(f"({id_}::pg_catalog.text[])" if several else id_, len(self.columns))


def key_types(source: psycopg.Connection[Any], attached: Attached) -> tuple[str, ...]:
    """Return the key types of a table that is attached to a tube."""
    query = sql.SQL("select pg_catalog.to_jsonb(pgchange.key_types({}::regclass, {}::name[])::text[])")
    name = table_identifier(attached.table).as_string(None)
    return tuple(ask(source, query.format(name, list(attached.key))))


def absent(source: psycopg.Connection[Any], attached: Attached, ids: Ids, kind: sql.SQL) -> Ids:
    """Return the ids that a copy of the table must not hold: their row is gone, or the predicate is false for it."""
    query = sql.SQL(
        "select w.id from unnest({ids}::{kind}) as w(id) "
        "where w.id not in (select {wanted}({tube}, {table}::regclass, {ids}::{kind}))"
    ).format(
        ids=list(ids),
        kind=kind,
        wanted=sql.Identifier("tube", "wanted" if kind.as_string(None) == "bigint[]" else "wanted_keys"),
        tube=attached.tube,
        table=table_identifier(attached.table).as_string(None),
    )
    return [id_ for (id_,) in rows(source, query)]
