"""Check that the staged columns fit the target table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import MergeRefused, PermissionDenied
from airflow_pgchange.feeds.grants import identifier
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.watched_connection import role_of
from airflow_pgchange.results.merge_modes import Behaviour, Mode
from airflow_pgchange.results.staging import RESERVED, ROOM
from airflow_pgchange.results.target import Column, Target, look_up

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
"""The target types of each staged type: they hold its values exactly or refuse them. Text can be staged for every other
type."""
DECIMAL = re.compile(r"numeric\(\d+,(\d+)\)")
INTERVAL = re.compile(r"interval(?:.* second|.*\(6\))?")
"""The interval types that keep microseconds."""


def validate(
    connection: psycopg.Connection[Any],
    target: str,
    key: Sequence[str],
    mode: Mode,
    columns: Mapping[str, str],
    *,
    ids: Sequence[str] = BIGINT,
) -> Target:
    """Return the target if the columns fit. ``columns`` has the PostgreSQL type in which each column will be staged.

    ``ids`` are the types of the batch's ids, with which a mirror's key ends. Raises MergeRefused if a column does not
    fit, and PermissionDenied. Call it before any work is done.
    """
    table, behaviour = look_up(connection, target), mode.behaviour
    if not table.is_table:
        raise MergeRefused(f"{target} is not a table: merge into the table under the view")
    if len(columns) > ROOM:
        raise MergeRefused(
            f"{target}: {len(columns)} columns are merged, but a staging table has at most {ROOM}: leave some out"
            + (", or merge them by several calls, each with the key" if behaviour.needs_key else "")
        )
    _check_key(table, key, mode, columns)
    if behaviour.deletes_touched:
        _check_ids(table, key, columns, ids)
    for name, kind in columns.items():
        _check_column(table, name, kind, behaviour, is_key=name in key)
        if behaviour.sums and name not in key:
            _check_sum(table, table.columns[name], kind)
    missing = [
        column.name for column in table.columns.values() if column.required and column.name not in columns
    ]
    if missing:
        raise MergeRefused(
            f"{target}: {_listed(missing)} must have a value and has no default: merge it, too"
        )
    denied = [right for right in behaviour.privileges if not table.privileges[right]]
    if denied:
        shown = table.identifier.as_string(None)
        role = identifier(role_of(connection))
        raise PermissionDenied(
            f"{role}, the role of the results connection, may not {' or '.join(denied)} on {target}:\n"
            f"let its owner run: grant {', '.join(denied)} on {shown} to {role}"
        )
    if behaviour.deletes_touched and table.is_hidden:
        raise PermissionDenied(
            f"row security hides rows of {target} from the role of the results connection, so it could not delete "
            f"rows that are gone. Merge as a role with bypassrls, or as the owner if row security is not forced"
        )
    return table


def _check_key(target: Target, key: Sequence[str], mode: Mode, columns: Mapping[str, str]) -> None:
    absent = [name for name in key if name not in columns]
    if absent:
        raise MergeRefused(f"{target.name}: the key's {_listed(absent)} is not among the merged columns")
    behaviour = mode.behaviour
    if not behaviour.needs_key:
        return
    if target.rules:
        raise MergeRefused(
            f"{target.name}: mode {mode} cannot overwrite rows of a table with rules ({', '.join(target.rules)}): "
            f"replace the rules by triggers, or use append"
        )
    if not key:
        raise MergeRefused(f"{target.name}: mode {mode} needs a key: the columns that identify a row")
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
                f'{target.name}: the key "{name}" is money, and would round the text that is merged: cast it in '
                f"Spark, as by "
                "cast('decimal(18,2)')"
            )
    if behaviour.sums and len(columns) == len(key):
        raise MergeRefused(f"{target.name}: there is no column to add besides the key {_listed(key)}")


def _check_ids(target: Target, key: Sequence[str], columns: Mapping[str, str], ids: Sequence[str]) -> None:
    if tuple(ids) == BIGINT and columns[key[-1]] not in INTEGERS:
        raise MergeRefused(
            f"{target.name}: the key of a mirror must end with an integer column, the id of the changes"
        )
    if len(key) < len(ids):
        raise MergeRefused(
            f"{target.name}: the key of a mirror must end with all {len(ids)} columns of the changes' ids "
            f"({', '.join(ids)}), but it is {_listed(key)}"
        )
    for name, kind in zip(key[-len(ids) :], ids, strict=True):
        if (columns[name] in INTEGERS) != (kind in ("bigint", "oid")):
            raise MergeRefused(
                f'{target.name}: "{name}" comes as {columns[name]}, but this column of the changes\' ids is {kind}. '
                "Let the key of a mirror end with the columns of the ids, in their order"
            )


def _check_column(target: Target, name: str, kind: str, behaviour: Behaviour, *, is_key: bool) -> None:
    if name.startswith(RESERVED):
        raise MergeRefused(f'{target.name}: names that begin with "{RESERVED}" are reserved: rename "{name}"')
    column = target.columns.get(name)
    if column is None:
        raise MergeRefused(
            f'{target.name} has no column "{name}": it has {_listed(sorted(target.columns))}; '
            "select or rename columns before merging"
        )
    if column.generated:
        raise MergeRefused(f'{target.name}: "{name}" is always generated: leave it out of the merge')
    if column.identity and not is_key:
        alter = sql.SQL("alter table {} alter column {} set generated by default").format(
            target.identifier, sql.Identifier(name)
        )
        others = "" if behaviour.copies_rows else "leave it out of the merge, or "
        raise MergeRefused(
            f'{target.name}: "{name}" is generated always as identity, and would refuse the merged values: {others}run '
            f"`{alter.as_string(None)}`"
        )
    if not _fits(kind, column.type):
        alter = sql.SQL("alter table {} alter column {} type {} using {}::{}").format(
            target.identifier, sql.Identifier(name), sql.SQL(kind), sql.Identifier(name), sql.SQL(kind)
        )
        instead = f", or run `{alter.as_string(None)}`" if behaviour.copies_rows else ""
        raise MergeRefused(
            f'{target.name}: "{name}" comes as {kind}, but its column is {column.type}, and values could be lost: '
            f"cast it in your code{instead}"
        )


def _check_sum(target: Target, column: Column, kind: str) -> None:
    """Raise MergeRefused if the column would round a sum. The total would then depend on where batches end."""
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
        f'{target.name}: "{column.name}" comes as {kind}, and its column, {column.stored}, would round the sum of '
        f"each batch. The total would depend on where batches end: {ways}"
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
    """Return the decimal places of a staged type; None if they are not limited."""
    match = DECIMAL.fullmatch(staged)
    return None if match is None else int(match[1])


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
