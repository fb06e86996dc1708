"""Compare the columns of a source with those of a table of results, by the catalogues of both databases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.results.value_checks import PRECISION

_NAMED = """
(select case when n.nspname <> 'pg_catalog' and pg_catalog.pg_type_is_visible(coalesce(e.oid, y.oid))
             then pg_catalog.quote_ident(n.nspname) || '.' else '' end || pg_catalog.format_type(y.oid, {modifier})
 from pg_catalog.pg_type as y
 left join pg_catalog.pg_type as e on e.oid = y.typelem and e.typarray = y.oid
 join pg_catalog.pg_namespace as n on n.oid = coalesce(e.typnamespace, y.typnamespace)
 where y.oid = {type})
"""
"""A type as ``format_type`` shows it, always with its schema unless that is pg_catalog."""

_SOURCE = f"""
select a.attname::text, {_NAMED.format(type="a.atttypid", modifier="-1")}, a.atttypmod,
    case when a.attgenerated <> '' or a.attidentity <> '' then 'is generated'
         when a.atthasdef or a.atthasmissing or t.typdefault is not null then 'has a default'
         when a.attnotnull or t.typnotnull then 'is not null' end
from pg_catalog.pg_attribute as a join pg_catalog.pg_type as t on t.oid = a.atttypid
where a.attrelid = pg_catalog.to_regclass({{table}}) and a.attnum > 0 and not a.attisdropped
  and a.attname = any ({{names}}::text[])
order by a.attnum
"""

_QUERY = f"""
select u.name, {_NAMED.format(type="u.type", modifier="-1")}, u.modifier
from unnest({{names}}::text[], {{types}}::oid[], {{modifiers}}::integer[])
    with ordinality as u(name, type, modifier, n)
order by u.n
"""

# Also look at the types of an array's elements and the base types of domains. The checks of a domain run with the rights
# of the role that writes a row.
_COMPARED = f"""
with recursive wanted as materialized (
    select x.place, x.name, x.modifier, pg_catalog.to_regtype(x.type)::pg_catalog.oid as oid
    from pg_catalog.jsonb_to_recordset({{columns}}) as x(place integer, name text, type text, modifier integer)
), part(place, oid, of_rows) as (
    select w.place, w.oid, true from wanted as w where w.oid is not null
    union
    select p.place, u.oid, p.of_rows and u.of_rows
    from part as p join pg_catalog.pg_type as t on t.oid = p.oid
    cross join lateral (values (t.typbasetype, true), (t.typelem, false)) as u(oid, of_rows)
    where u.oid <> 0
)
select w.place, {_NAMED.format(type="w.oid", modifier="w.modifier")},
    {_NAMED.format(type="a.atttypid", modifier="a.atttypmod")}, coalesce(a.attgenerated <> '', false),
    (select pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.collname)
     from pg_catalog.pg_collation as c join pg_catalog.pg_namespace as n on n.oid = c.collnamespace
     where c.oid = a.attcollation and c.collname <> 'default'),
    exists (select from part as p join pg_catalog.pg_type as t on t.oid = p.oid
            where p.place = w.place and p.of_rows and t.typtype = 'd'
              and (t.typnotnull or t.typdefault is not null
                   or exists (select from pg_catalog.pg_constraint as c where c.contypid = t.oid))),
    (select r.rolname::text
     from part as p
     join pg_catalog.pg_type as t on t.oid = p.oid join pg_catalog.pg_roles as r on r.oid = t.typowner
     where p.place = w.place and not r.rolsuper and not pg_catalog.pg_has_role(r.oid, 'usage')
     limit 1)
from wanted as w
left join pg_catalog.pg_attribute as a
    on a.attrelid = pg_catalog.to_regclass({{table}}) and a.attname = w.name and a.attnum > 0 and not a.attisdropped
order by w.place
"""

# Find constraints and indexes that PostgreSQL makes again after a change of type, for which it reads the whole table.
_READ_AGAIN = """
with recursive tree(oid) as (
    select pg_catalog.to_regclass({table})::pg_catalog.oid
    union
    select i.inhrelid from tree as t join pg_catalog.pg_inherits as i on i.inhparent = t.oid
)
select a.attname::text, o.kind || ' ' || pg_catalog.quote_ident(o.name)
from tree as t
join pg_catalog.pg_attribute as a on a.attrelid = t.oid and a.attname = any ({names}::text[])
cross join lateral (
    select 'constraint', c.conname from pg_catalog.pg_constraint as c
    where c.conrelid = t.oid and c.contype = 'c' and a.attnum = any (c.conkey)
    union all
    select 'index', x.relname
    from pg_catalog.pg_index as i join pg_catalog.pg_class as x on x.oid = i.indexrelid
    where i.indrelid = t.oid
      -- PostgreSQL keeps a table's index on plain columns, but not those of partitions.
      and (i.indpred is not null or i.indexprs is not null or not i.indisvalid or x.relkind = 'I' or x.relispartition)
      and (a.attnum = any (i.indkey::smallint[]) or exists (
          select from pg_catalog.pg_depend as d
          where d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objid = i.indexrelid
            and d.refclassid = d.classid and d.refobjid = t.oid and d.refobjsubid = a.attnum))
) as o(kind, name)
order by 1, 2
"""


@dataclass(frozen=True)
class SourceColumn:
    """A column of the source, which a table of results should have too. ``type`` is its type without length, and with
    its schema.

    ``filled`` says why rows that were merged before would lack the values of a new column; None if they lack none. A
    column of a frame or a query is not ``declared``. A frame has no length of strings, and both often have more digits
    than their values.
    """

    name: str
    type: str
    modifier: int = -1
    filled: str | None = None
    declared: bool = True


@dataclass(frozen=True)
class Compared:
    """A column of the source, and the column of the target with its name.

    ``source_type`` is the source's type as the target's database shows it, None if that database lacks it.
    ``target_type`` is the type of the target's column, None if there is no such column. ``constrained``: the source's
    type is a domain with constraints or a default. ``stranger`` is the owner of the source's type if it is neither a
    superuser nor a role that this role is a member of.
    """

    column: SourceColumn
    source_type: str | None
    target_type: str | None
    generated: bool
    collation: str | None
    constrained: bool
    stranger: str | None


def columns_of_table(source: psycopg.Connection[Any], table: str, names: Sequence[str]) -> list[SourceColumn]:
    """Return the columns of a table or a view that have these names, in its order."""
    query = sql.SQL(_SOURCE).format(table=_shown(table), names=list(names))
    return [SourceColumn(*column) for column in rows(source, query)]


def columns_of_frame(types: Mapping[str, str]) -> list[SourceColumn]:
    """Return the columns of a frame, by the types in which they are staged."""
    columns = []
    for name, kind in types.items():
        decimal = PRECISION.match(kind)
        if decimal is None:
            columns.append(SourceColumn(name, kind, declared=False))
            continue
        precision, scale = map(int, decimal.groups())
        # PostgreSQL keeps precision and scale in one number.
        modifier = (precision << 16 | scale) + 4
        columns.append(SourceColumn(name, "numeric" + kind[decimal.end() :], modifier, declared=False))
    return columns


def columns_of_query(source: psycopg.Connection[Any], query: sql.Composable) -> list[SourceColumn]:
    """Return the columns of a query. A computed column has no length and no precision."""
    result = source.execute(sql.SQL("select * from ({}\n) as r limit 0").format(query)).pgresult
    assert result is not None
    indexes = range(result.nfields)
    described = sql.SQL(_QUERY).format(
        names=[(result.fname(index) or b"").decode() for index in indexes],
        types=[result.ftype(index) for index in indexes],
        modifiers=[result.fmod(index) for index in indexes],
    )
    return [SourceColumn(name, kind, size, declared=False) for name, kind, size in rows(source, described)]


def compared(
    results: psycopg.Connection[Any], target: str, columns: Sequence[SourceColumn]
) -> list[Compared]:
    """Return each column of the source, compared with the target's column of that name."""
    listed = Jsonb([{"place": index, **asdict(column)} for index, column in enumerate(columns)])
    query = sql.SQL(_COMPARED).format(columns=listed, table=_shown(target))
    return [Compared(columns[index], *values) for index, *values in rows(results, query)]


def read_again(
    results: psycopg.Connection[Any], target: str, columns: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the columns whose change of type makes PostgreSQL read the whole table, each with the index or constraint
    that is the cause."""
    if not columns:
        return []
    query = sql.SQL(_READ_AGAIN).format(table=_shown(target), names=list(columns))
    return [(column, made) for column, made in rows(results, query)]


def _shown(table: str) -> str:
    return table_identifier(table).as_string(None)
