"""Where results go: what a target table must be like for what is staged to fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.errors import InvalidArgument, MergeRefused, PermissionDenied
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.staging import RESERVED, ROOM, Mode
from airflow_pgchange.feeds.tables import table_identifier

INTEGERS = frozenset({"smallint", "integer", "bigint"})
FLOATS = frozenset({"real", "double precision"})
ADDITIVE = INTEGERS | FLOATS | {"numeric", "money", "interval"}
EXACT: Mapping[str, frozenset[str]] = {
    "smallint": INTEGERS | FLOATS | {"numeric", "oid"},
    "integer": INTEGERS | {"double precision", "numeric", "oid"},
    "bigint": INTEGERS | {"numeric", "oid"},
    "real": FLOATS,
    "double precision": frozenset({"double precision"}),
    "numeric": frozenset({"numeric", "money"}),
    "boolean": frozenset({"boolean"}),
    "bytea": frozenset({"bytea"}),
    "date": frozenset({"date"}),
    "timestamp without time zone": frozenset({"timestamp without time zone"}),
    "timestamp with time zone": frozenset({"timestamp with time zone"}),
}
"""The targets of each staged type that lose nothing, or refuse the value; text goes into every other type."""
DECIMAL = re.compile(r"numeric\(\d+,(\d+)\)")
INTERVAL = re.compile(r"interval(?:.* second|.*\(6\))?")
"""The intervals that keep microseconds, whichever fields they name."""

PRIVILEGES: Mapping[Mode, Sequence[str]] = {
    "append": ("insert",),
    "add": ("select", "insert", "update"),
    "replace": ("select", "insert", "update"),
    "mirror": ("select", "insert", "update", "delete"),
}

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
    'delete', pg_catalog.has_table_privilege(c.oid, 'delete')), pg_catalog.row_security_active(c.oid)
from pg_catalog.pg_class c
where c.oid = pg_catalog.to_regclass({{}})
"""


@dataclass(frozen=True)
class Column:
    """``type`` is without length or precision, domains looked through: casting to it cuts nothing off. ``stored`` is with
    them, and ``places`` the decimal places that are kept; None: all."""

    name: str
    type: str
    stored: str
    places: int | None
    required: bool
    generated: bool
    identity: bool
    """Always made by PostgreSQL, unless it is told to take another."""


@dataclass(frozen=True)
class Target:
    name: str
    columns: Mapping[str, Column]
    unique: Sequence[frozenset[str]]
    privileges: Mapping[str, bool]
    is_table: bool = True
    is_hidden: bool = False
    """Whether row security hides rows of it."""

    @property
    def identifier(self) -> sql.Identifier:
        return table_identifier(self.name)

    def check_shards(self, shard: str, key: str) -> None:
        """Raises InvalidArgument for a copy of several tables' rows that has nothing to tell them apart by."""
        if shard not in self.columns:
            raise InvalidArgument(
                f"{self.name} is of several tables' rows and has no column {shard} to tell them apart: add it, not null, "
                f"by default the shard of the rows that are there, and make ({shard}, {key}) the key"
            )

    def is_of_shards(self, shard: str, key: str) -> bool:
        """Whether its key is (shard, id): it is of several tables' rows, or was before the others were dropped."""
        return frozenset({shard, key}) in self.unique and frozenset({key}) not in self.unique


def look_up(connection: psycopg.Connection[Any], name: str) -> Target:
    """The table or view as it is now; raises MergeRefused where there is none."""
    shown = table_identifier(name).as_string(None)
    found = rows(connection, sql.SQL(_TARGET).format(shown))
    if not found:
        raise MergeRefused(f"there is no table {name} in the results database: create it, with a unique key")
    [(columns, unique, is_table, privileges, is_hidden)] = found
    return Target(
        name,
        {column["name"]: Column(**column) for column in columns},
        [frozenset(names) for names in unique if names],
        privileges,
        is_table,
        is_hidden,
    )


def validate(
    connection: psycopg.Connection[Any],
    target: str,
    key: Sequence[str],
    mode: Mode,
    columns: Mapping[str, str],
) -> Target:
    """The target, if ``columns`` (name to PostgreSQL type, as they will be staged) fit into it.

    Raises MergeRefused for what does not fit, and PermissionDenied: call it before any work is done.
    """
    found = look_up(connection, target)
    if not found.is_table:
        raise MergeRefused(f"{target} is not a table: merge into the table behind it")
    if len(columns) > ROOM:
        raise MergeRefused(
            f"{target}: {len(columns)} columns come, and a staging table has room for {ROOM}: leave some out"
            + ("" if mode == "append" else ", or merge them by several calls, each with the key")
        )
    _check_key(found, key, mode, columns)
    for name, kind in columns.items():
        _check_column(found, name, kind, mode, is_key=name in key)
        if mode == "add" and name not in key:
            _check_sum(found, found.columns[name], kind)
    missing = [
        column.name for column in found.columns.values() if column.required and column.name not in columns
    ]
    if missing:
        raise MergeRefused(
            f"{target}: {_listed(missing)} must have a value and has no default: add it to what is merged"
        )
    denied = [right for right in PRIVILEGES[mode] if not found.privileges[right]]
    if denied:
        shown = found.identifier.as_string(None)
        raise PermissionDenied(
            f"the role of the results connection may not {' or '.join(denied)} on {target}: "
            f"let its owner run `grant {', '.join(denied)} on {shown} to <role>`"
        )
    if mode == "mirror" and found.is_hidden:
        raise PermissionDenied(
            f"row security hides rows of {target} from the role of the results connection, which could not delete "
            "what is gone: merge as a role with bypassrls, or as its owner without force row level security"
        )
    return found


def _check_key(target: Target, key: Sequence[str], mode: Mode, columns: Mapping[str, str]) -> None:
    absent = [name for name in key if name not in columns]
    if absent:
        raise MergeRefused(f"{target.name}: the key's {_listed(absent)} is not in what is merged")
    if mode == "append":
        return
    if not key:
        raise MergeRefused(
            f"{target.name}: mode {mode} needs a key: the columns that tell a row from the others"
        )
    if frozenset(key) not in target.unique:
        index = sql.SQL("create unique index on {} ({})").format(
            target.identifier, sql.SQL(", ").join(map(sql.Identifier, key))
        )
        raise MergeRefused(
            f"{target.name}: no unique index on exactly {_listed(key)}, so rows cannot be found by it: "
            f"run `{index.as_string(None)}`"
        )
    for name in key:
        if name in target.columns and target.columns[name].type == "money" and columns[name] == "text":
            raise MergeRefused(
                f'{target.name}: the key "{name}" is money and comes as text, which it would round: cast it in Spark, '
                "as by cast('decimal(18,2)')"
            )
    if mode == "add" and len(columns) == len(key):
        raise MergeRefused(f"{target.name}: nothing to add beside the key {_listed(key)}")
    if mode == "mirror" and columns[key[-1]] not in INTEGERS:
        raise MergeRefused(
            f"{target.name}: the key of a mirror ends with an integer column, the id that changes name"
        )


def _check_column(target: Target, name: str, kind: str, mode: Mode, *, is_key: bool) -> None:
    if name.startswith(RESERVED):
        raise MergeRefused(f'{target.name}: names that begin with "{RESERVED}" are reserved: rename "{name}"')
    column = target.columns.get(name)
    if column is None:
        raise MergeRefused(
            f'{target.name} has no column "{name}": it has {_listed(sorted(target.columns))}; '
            "select or rename columns before merging"
        )
    if column.generated:
        raise MergeRefused(f'{target.name}: "{name}" is always generated: leave it out of what is merged')
    if column.identity and not is_key:
        alter = sql.SQL("alter table {} alter column {} set generated by default").format(
            target.identifier, sql.Identifier(name)
        )
        others = "" if mode == "mirror" else "leave it out of what is merged, or "
        raise MergeRefused(
            f'{target.name}: "{name}" is generated always as identity, and would not take what comes: {others}run '
            f"`{alter.as_string(None)}`"
        )
    if not _fits(kind, column.type):
        raise MergeRefused(
            f'{target.name}: "{name}" comes as {kind} and its column is {column.type}: cast it in Spark, '
            "so that nothing is lost unseen"
        )


def _check_sum(target: Target, column: Column, kind: str) -> None:
    """A sum that is rounded where a batch ends would depend on where that is."""
    if column.type not in ADDITIVE:
        raise MergeRefused(
            f'{target.name}: column "{column.name}" is {column.type}, which cannot be added: put it into the key, leave '
            "it out, or use another mode"
        )
    if _adds_exactly(column, kind):
        return
    wider = {"real": "double precision", "money": "numeric"}.get(column.type, column.type)
    alter = sql.SQL("alter table {} alter column {} type {}").format(
        target.identifier, sql.Identifier(column.name), sql.SQL(wider)
    )
    ways = f"run `{alter.as_string(None)}`"
    if column.places is not None and column.places >= 0:
        ways = f"round each value in Spark before it is summed, as by cast('decimal(18,{column.places})'), or {ways}"
    raise MergeRefused(
        f'{target.name}: "{column.name}" comes as {kind} and its column, {column.stored}, would round the sum of each '
        f"batch, so that the total depended on where batches end: {ways}"
    )


def _adds_exactly(column: Column, kind: str) -> bool:
    """Whether no sum of such values is rounded, except for the last digits of a double precision."""
    if column.type == "interval":
        return INTERVAL.fullmatch(column.stored) is not None
    if column.places is None:
        return column.stored == column.type != "real"
    places = 0 if kind in INTEGERS else _places(kind)
    return places is not None and places <= column.places


def _places(staged: str) -> int | None:
    """The decimal places of what is staged; None where they can be any number."""
    found = DECIMAL.fullmatch(staged)
    return None if found is None else int(found[1])


def _fits(staged: str, target: str) -> bool:
    if staged.endswith("[]") and target.endswith("[]"):
        return _fits(staged[:-2], target[:-2])
    if DECIMAL.fullmatch(staged):
        return _fits("numeric", target)
    if staged == "text":
        return target not in EXACT or target == "numeric"
    return target in EXACT.get(staged, frozenset())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
