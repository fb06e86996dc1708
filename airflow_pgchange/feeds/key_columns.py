"""The columns of a table's key beside the ids of changes: how to find a row by an id through the table's index.

The id of a change is a ``bigint``, or the key's text, or for a key of several columns the array of their texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.table_names import table_identifier

KeyNames = str | Sequence[str]
"""The columns of a table that hold the ids of changes, in the order in which an id has them; a name for one column."""
PRINTED = frozenset({"pg_catalog.inet", "pg_catalog.cidr"})
"""An id has the text that PostgreSQL prints. A cast to text adds something to it for values of these types."""
NUMERIC = 'pg_catalog."numeric"'
"""The type as ``quote_ident`` writes it, because its name is a keyword."""
AND = sql.SQL(" and ")

# A domain is looked through, with the length of the type that it is made of.
_COLUMNS = """
with recursive part as materialized (
    select u.place, u.name, u.id_type, a.atttypid, a.atttypmod, a.attcollation
    from unnest({names}::text[], {types}::text[]) with ordinality as u(name, id_type, place)
    left join pg_catalog.pg_attribute as a
        on a.attrelid = pg_catalog.to_regclass({table}) and a.attname = u.name and a.attnum > 0 and not a.attisdropped
), line(place, oid, modifier) as (
    select p.place, p.atttypid, p.atttypmod from part as p
    union all
    select l.place, t.typbasetype, case when l.modifier >= 0 then l.modifier else t.typtypmod end
    from line as l join pg_catalog.pg_type as t on t.oid = l.oid where t.typtype = 'd'
)
select p.name, p.id_type, t.typname::text,
    pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(t.typname), l.modifier,
    (select pg_catalog.quote_ident(s.nspname) || '.' || pg_catalog.quote_ident(c.collname)
     from pg_catalog.pg_collation as c join pg_catalog.pg_namespace as s on s.oid = c.collnamespace
     where c.oid = p.attcollation),
    pg_catalog.to_regtype(p.id_type)::pg_catalog.oid is distinct from case
        when t.typname in ('int2', 'int4') then 'pg_catalog.int8'::pg_catalog.regtype
        when t.typname in ('varchar', 'bpchar', 'name') then 'pg_catalog.text'::pg_catalog.regtype
        else t.oid end and pg_catalog.to_regtype(p.id_type) is not null
from part as p
left join line as l on l.place = p.place
    and not exists (select from pg_catalog.pg_type as d where d.oid = l.oid and d.typtype = 'd')
left join pg_catalog.pg_type as t on t.oid = l.oid
left join pg_catalog.pg_namespace as n on n.oid = t.typnamespace
order by p.place
"""

_TYPES = """
select pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(t.typname)
from unnest({types}::text[]) with ordinality as u(name, place)
left join pg_catalog.pg_type as t on t.oid = pg_catalog.to_regtype(u.name)
left join pg_catalog.pg_namespace as n on n.oid = t.typnamespace
order by u.place
"""


@dataclass(frozen=True)
class KeyColumn:
    """A column of a key. ``type``, with its schema, is the type to which the text of an id is cast for a comparison.

    It is None if ids are numbers, which are compared without a cast. ``length`` is the length of a ``char``, and
    ``numeric`` the precision and scale of a ``numeric``: the column holds no other values.
    """

    name: str
    type: str | None = None
    collation: str | None = None
    length: int | None = None
    numeric: tuple[int, int] | None = None

    def finds(self, table: str, text: sql.Composable) -> sql.Composed:
        """Return the condition that the column of ``table`` (an alias) has the value of this text. It can use an
        index."""
        column = sql.Identifier(table, self.name)
        if self.type is None:
            return sql.SQL("{} = {}").format(column, text)
        condition = sql.SQL("{} = {}").format(column, self._cast(text))
        if self.type != "pg_catalog.bpchar":
            return condition
        # "char" ignores trailing spaces, and a text of another table with this shape of key may have some.
        return sql.SQL('{} and {}::pg_catalog.text collate "C" = {}').format(condition, column, text)

    def shown(self, table: str) -> sql.Composed:
        """Return the SQL expression of the column, of the alias ``table``, as it appears in an id: as text, or as a
        number."""
        column = sql.Identifier(table, self.name)
        if self.type is None:
            return sql.SQL("{}").format(column)
        if self.type == NUMERIC:
            return sql.SQL("pg_catalog.trim_scale({})::pg_catalog.text").format(column)
        if self.type in PRINTED or not self.type.startswith("pg_catalog."):
            return sql.SQL("pg_catalog.concat({})").format(column)
        return sql.SQL("{}::pg_catalog.text").format(column)

    def value(self, text: sql.Composable) -> sql.Composed:
        """Return the SQL expression that casts a text to the column's type; null if the column cannot hold the value."""
        cast = self._cast(text)
        if self.length is not None:
            return sql.SQL(
                "case when pg_catalog.char_length({0}) <= {1} then ({0})::pg_catalog.bpchar({1}) end"
            ).format(text, self.length)
        if self.numeric is None:
            return cast
        precision, scale = self.numeric
        return sql.SQL(
            "case when pg_catalog.round({0}, {1}) = {0} and pg_catalog.abs({0}) < {2} "
            "then ({3})::pg_catalog.numeric({4}, {1}) end"
        ).format(cast, scale, sql.SQL(f"1e{precision - scale}"), text, precision)

    def _cast(self, text: sql.Composable) -> sql.Composed:
        collate = sql.SQL("" if self.collation is None else f" collate {self.collation}")
        return sql.SQL("({})::{}{}").format(text, sql.SQL(self.type or ""), collate)


def names_of(key: KeyNames) -> tuple[str, ...]:
    """Return the columns of a key that a caller gave as a name or as a sequence of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def parts(id_: str, count: int) -> list[sql.Composable]:
    """Return SQL expressions for the texts of an id's columns. ``id_`` is the SQL expression of the id."""
    return [sql.SQL(id_)] if count == 1 else [sql.SQL(f"{id_}[{index}]") for index in range(1, count + 1)]


def found_by(table: str, key: Sequence[KeyColumn], texts: Sequence[sql.Composable]) -> sql.Composed:
    """Return the condition that a row of ``table`` (an alias) has the key with these texts, each for a column."""
    return AND.join(column.finds(table, text) for column, text in zip(key, texts, strict=True))


def key_columns(
    connection: psycopg.Connection[object], table: str, names: Sequence[str], types: Sequence[str | None]
) -> tuple[KeyColumn, ...]:
    """Return the columns of a table that hold the ids of changes, given the types of these ids.

    A type that is None is not checked. Raises InvalidArgument if a column is missing or has another type, or if there
    are more or fewer columns than types.
    """
    if len(names) != len(types):
        raise InvalidArgument(
            f"{table}: the ids of the changes have {len(types)} columns ({', '.join(map(str, types))}), but key has "
            f"{len(names)} ({', '.join(names)}). Name the columns of the key in the order of the ids"
        )
    if tuple(types) == BIGINT:
        return tuple(map(KeyColumn, names))
    query = sql.SQL(_COLUMNS).format(
        names=list(names), types=list(types), table=table_identifier(table).as_string(None)
    )
    return tuple(_column(table, _CatalogRow(*row)) for row in rows(connection, query))


def typed_columns(connection: psycopg.Connection[object], types: Sequence[str]) -> tuple[KeyColumn, ...]:
    """Return columns for ids that belong to no table, given the types of these ids. Empty for ids that are numbers."""
    if tuple(types) == BIGINT:
        return ()
    found = rows(connection, sql.SQL(_TYPES).format(types=list(types)))
    # A type that this role's search path does not show is read as text.
    return tuple(KeyColumn(str(index), type_ or "pg_catalog.text") for index, (type_,) in enumerate(found))


@dataclass(frozen=True)
class _CatalogRow:
    """A column of a table in the catalogue. ``kind`` is the type's name, and None if there is no such column."""

    name: str
    id_type: str
    kind: str | None
    type: str
    modifier: int
    collation: str | None
    differs: bool


def _column(table: str, row: _CatalogRow) -> KeyColumn:
    if row.kind is None:
        raise InvalidArgument(f'{table} has no column "{row.name}": correct the table or its key')
    if row.differs:
        kind = row.type.removeprefix("pg_catalog.").replace('"', "")
        raise InvalidArgument(
            f'{table}: column "{row.name}" of the key is {kind}, and the ids of the '
            f"changes are {row.id_type}: name the column that holds the changes' ids"
        )
    if row.kind in ("int2", "int4"):
        return KeyColumn(row.name, "pg_catalog.int8")
    if row.kind == "name":
        # Do not cast to name: the cast would truncate a longer text, which could then match another row.
        return KeyColumn(row.name, "pg_catalog.text", row.collation)
    sized = row.modifier >= 0
    return KeyColumn(
        row.name,
        row.type,
        row.collation,
        length=row.modifier - 4 if sized and row.kind == "bpchar" else None,
        numeric=_precision(row.modifier) if sized and row.kind == "numeric" else None,
    )


def _precision(modifier: int) -> tuple[int, int]:
    """Return the precision and the scale of a numeric type. The scale is a signed number of 11 bits."""
    return (modifier - 4) >> 16, (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400
