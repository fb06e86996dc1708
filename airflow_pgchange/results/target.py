"""The target of a merge: a table as it is in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.table_names import table_identifier

_COLUMNS = """
select coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
    'name', a.attname,
    'type', pg_catalog.format_type(base.oid, -1) || base.array,
    'stored', pg_catalog.format_type(base.oid, base.modifier) || base.array,
    'places', case base.oid
        when 'pg_catalog.money'::regtype then pg_catalog.scale(0::pg_catalog.money::pg_catalog.numeric)
        when 'pg_catalog.numeric'::regtype then
            case when base.modifier >= 0 then ((base.modifier - 4) & 2047 # 1024) - 1024 end
        end,
    'required', (a.attnotnull or t.typnotnull) and not a.atthasdef and a.attidentity = '' and t.typdefault is null,
    'generated', a.attgenerated <> '', 'identity', a.attidentity = 'a')), '[]')
from pg_catalog.pg_attribute a
join pg_catalog.pg_type t on t.oid = a.atttypid
cross join lateral (
    with recursive kind (oid, modifier, "array") as (
        select t.oid, a.atttypmod, ''
        union all
        select coalesce(e.oid, k.typbasetype), case when kind.modifier >= 0 then kind.modifier else k.typtypmod end,
               kind."array" || case when e.oid is null then '' else '[]' end
        from kind
        join pg_catalog.pg_type k on k.oid = kind.oid
        left join pg_catalog.pg_type e on e.oid = k.typelem and e.typarray = k.oid
        where k.typbasetype <> 0 or e.oid is not null
    )
    select kind.oid, kind.modifier, kind."array" as array
    from kind
    join pg_catalog.pg_type k on k.oid = kind.oid and k.typbasetype = 0
    where not exists (select from pg_catalog.pg_type e where e.oid = k.typelem and e.typarray = k.oid)
) base
where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
"""
_UNIQUE = """
select coalesce(pg_catalog.jsonb_agg((
    select pg_catalog.jsonb_agg(a.attname)
    from pg_catalog.unnest(i.indkey::smallint[]) with ordinality k (attnum, place)
    join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
    where k.place <= i.indnkeyatts)), '[]')
from pg_catalog.pg_index i
where i.indrelid = c.oid and i.indisunique and i.indimmediate and i.indisvalid
  and i.indpred is null and i.indexprs is null
"""
_TARGET = f"""
select ({_COLUMNS}), ({_UNIQUE}), c.relkind in ('r', 'p'), pg_catalog.jsonb_build_object(
    'select', pg_catalog.has_table_privilege(c.oid, 'select'),
    'insert', pg_catalog.has_table_privilege(c.oid, 'insert'),
    'update', pg_catalog.has_table_privilege(c.oid, 'update'),
    'delete', pg_catalog.has_table_privilege(c.oid, 'delete')), pg_catalog.row_security_active(c.oid), (
    -- PostgreSQL refuses "on conflict" for tables with such rules. Types 2 and 3 are update and insert.
    select coalesce(pg_catalog.array_agg(r.rulename::text order by r.rulename), array[]::text[])
    from pg_catalog.pg_rewrite as r
    where r.ev_class = c.oid and r.ev_type in ('2', '3')),
    -- Partitions are not asked for their sizes, since that would lock all of them.
    c.relkind = 'r' and pg_catalog.pg_relation_size(c.oid) = 0
from pg_catalog.pg_class c
where c.oid = pg_catalog.to_regclass({{}})
"""


@dataclass(frozen=True)
class Column:
    """A column of a target.

    ``type`` has no length or precision, so a cast to it loses nothing. For a domain it is the base type. ``stored`` is
    the type with length and precision. ``places`` is the number of decimal places that are kept; None: all.
    """

    name: str
    type: str
    stored: str
    places: int | None
    required: bool
    generated: bool
    identity: bool
    """``generated always as identity``: PostgreSQL accepts another value only with ``overriding system value``."""


@dataclass(frozen=True)
class Target:
    """A table or a view: its columns by name, and the privileges of the connection's role.

    ``unique`` has the columns of each unique index that a merge can use.
    """

    name: str
    columns: Mapping[str, Column]
    unique: Sequence[frozenset[str]]
    privileges: Mapping[str, bool]
    is_table: bool = True
    is_hidden: bool = False
    """Whether row security hides rows of the table."""
    rules: Sequence[str] = ()
    """The rules for inserts and updates. A merge cannot overwrite rows of a table that has such rules."""
    is_empty: bool = False
    """Whether the table has no rows for certain: it is not partitioned, and its file has no pages."""

    @property
    def identifier(self) -> sql.Identifier:
        return table_identifier(self.name)

    def check_shards(self, shard: str, key: Sequence[str]) -> None:
        """Raise InvalidArgument if a shared copy has no column for the shard, or no key with it."""
        if shard not in self.columns:
            raise InvalidArgument(
                f"{self.name} holds rows of several tables and has no column {shard} to tell them apart. Add it as "
                f"not null, with the shard of the old rows as its default, and make ({', '.join([shard, *key])}) the key"
            )

    def is_of_shards(self, shard: str, key: Sequence[str]) -> bool:
        """Whether the key is the shard and the id: the copy holds rows of several tables, or did before the others were
        dropped."""
        return frozenset({shard, *key}) in self.unique and frozenset(key) not in self.unique


def look_up(connection: psycopg.Connection[Any], name: str) -> Target:
    """Return the table or view as it is now. Raises MergeRefused if it does not exist."""
    shown = table_identifier(name).as_string(None)
    found = rows(connection, sql.SQL(_TARGET).format(shown))
    if not found:
        raise MergeRefused(f"there is no table {name} in the results database: create it, with a unique key")
    [(columns, unique, is_table, privileges, is_hidden, rules, is_empty)] = found
    return Target(
        name,
        {column["name"]: Column(**column) for column in columns},
        [frozenset(names) for names in unique if names],
        privileges,
        is_table,
        is_hidden,
        rules,
        is_empty,
    )
