"""What a target table must be like for what is staged to fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import MergeRefused, PermissionDenied
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.results.modes import Behaviour, Mode
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
"""The targets of each staged type that lose nothing, or refuse the value; text goes into every other type."""
DECIMAL = re.compile(r"numeric\(\d+,(\d+)\)")
INTERVAL = re.compile(r"interval(?:.* second|.*\(6\))?")
"""The intervals that keep microseconds, whichever fields they name."""


def validate(
    connection: psycopg.Connection[Any],
    target: str,
    key: Sequence[str],
    mode: Mode,
    columns: Mapping[str, str],
    *,
    ids: Sequence[str] = BIGINT,
) -> Target:
    """The target, if ``columns`` (name to PostgreSQL type, as they will be staged) fit into it.

    ``ids`` are the key types of the batch, whose ids are the end of a mirror's key.
    Raises MergeRefused for what does not fit, and PermissionDenied: call it before any work is done.
    """
    found, behaviour = look_up(connection, target), mode.behaviour
    if not found.is_table:
        raise MergeRefused(f"{target} is not a table: merge into the table behind it")
    if len(columns) > ROOM:
        raise MergeRefused(
            f"{target}: {len(columns)} columns come, and a staging table has room for {ROOM}: leave some out"
            + (", or merge them by several calls, each with the key" if behaviour.needs_key else "")
        )
    _check_key(found, key, mode, columns)
    if behaviour.deletes_touched:
        _check_ids(found, key, columns, ids)
    for name, kind in columns.items():
        _check_column(found, name, kind, behaviour, is_key=name in key)
        if behaviour.sums and name not in key:
            _check_sum(found, found.columns[name], kind)
    missing = [
        column.name for column in found.columns.values() if column.required and column.name not in columns
    ]
    if missing:
        raise MergeRefused(
            f"{target}: {_listed(missing)} must have a value and has no default: add it to what is merged"
        )
    denied = [right for right in behaviour.privileges if not found.privileges[right]]
    if denied:
        shown = found.identifier.as_string(None)
        raise PermissionDenied(
            f"the role of the results connection may not {' or '.join(denied)} on {target}: "
            f"let its owner run `grant {', '.join(denied)} on {shown} to <role>`"
        )
    if behaviour.deletes_touched and found.is_hidden:
        raise PermissionDenied(
            f"row security hides rows of {target} from the role of the results connection, which could not delete "
            "what is gone: merge as a role with bypassrls, or as its owner without force row level security"
        )
    return found


def _check_key(target: Target, key: Sequence[str], mode: Mode, columns: Mapping[str, str]) -> None:
    absent = [name for name in key if name not in columns]
    if absent:
        raise MergeRefused(f"{target.name}: the key's {_listed(absent)} is not in what is merged")
    behaviour = mode.behaviour
    if not behaviour.needs_key:
        return
    if target.rules:
        raise MergeRefused(
            f"{target.name}: PostgreSQL does not overwrite rows under rules of the table ({', '.join(target.rules)}), as "
            f"mode {mode} does: put triggers in their place, or use append"
        )
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
    if behaviour.sums and len(columns) == len(key):
        raise MergeRefused(f"{target.name}: nothing to add beside the key {_listed(key)}")


def _check_ids(target: Target, key: Sequence[str], columns: Mapping[str, str], ids: Sequence[str]) -> None:
    if tuple(ids) == BIGINT and columns[key[-1]] not in INTEGERS:
        raise MergeRefused(
            f"{target.name}: the key of a mirror ends with an integer column, the id that changes name"
        )
    if len(key) < len(ids):
        raise MergeRefused(
            f"{target.name}: the ids that changes name have {len(ids)} columns ({', '.join(ids)}), and the key of a "
            f"mirror ends with all of them: it is {_listed(key)}"
        )
    for name, kind in zip(key[-len(ids) :], ids, strict=True):
        if (columns[name] in INTEGERS) != (kind in ("bigint", "oid")):
            raise MergeRefused(
                f'{target.name}: "{name}" comes as {columns[name]}, and this column of the ids that changes name is '
                f"{kind}: let the key of a mirror end with the columns of the ids, in their order"
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
        raise MergeRefused(f'{target.name}: "{name}" is always generated: leave it out of what is merged')
    if column.identity and not is_key:
        alter = sql.SQL("alter table {} alter column {} set generated by default").format(
            target.identifier, sql.Identifier(name)
        )
        others = "" if behaviour.copies_rows else "leave it out of what is merged, or "
        raise MergeRefused(
            f'{target.name}: "{name}" is generated always as identity, and would not take what comes: {others}run '
            f"`{alter.as_string(None)}`"
        )
    if not _fits(kind, column.type):
        alter = sql.SQL("alter table {} alter column {} type {} using {}::{}").format(
            target.identifier, sql.Identifier(name), sql.SQL(kind), sql.Identifier(name), sql.SQL(kind)
        )
        instead = f", or run `{alter.as_string(None)}`" if behaviour.copies_rows else ""
        raise MergeRefused(
            f'{target.name}: "{name}" comes as {kind} and its column is {column.type}: cast it where it is '
            f"computed, so that nothing is lost unseen{instead}"
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
