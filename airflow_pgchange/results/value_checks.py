"""Find staged values that do not fit their columns, and the rows that have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.results.column_checks import DECIMAL, INTEGERS
from airflow_pgchange.results.staging import ATTEMPT, TOUCHED, Staged
from airflow_pgchange.results.target import Column, Target

BITS = {"smallint": 16, "integer": 32, "bigint": 64}
CUT = frozenset({"name", '"char"'})
"""Types that silently cut a text that is too long."""
PRECISION = re.compile(r"numeric\((\d+),(-?\d+)\)")


def is_winner(staged: Staged) -> sql.Composed:
    """Return the condition that a row was staged by a winning attempt."""
    attempts = [attempt for attempt, _ in staged.winners]
    return sql.SQL("{} = any({}::bigint[])").format(sql.Identifier(ATTEMPT), attempts)


def first_lossy(connection: psycopg.Connection[Any], staged: Staged, target: Target, name: str) -> str | None:
    """Return a value that the target's type would change; None if there is none."""
    query = sql.SQL("select {0} from {1} where {2} and {0}::{3}::{4} <> {0} order by 1 limit 1").format(
        sql.Identifier(name),
        staged.identifier,
        is_winner(staged),
        sql.SQL(target.columns[name].type),
        sql.SQL(dict(staged.columns)[name]),
    )
    row = connection.execute(query).fetchone()
    return None if row is None else f"{name}={row[0]}"


def check_cut(connection: psycopg.Connection[Any], staged: Staged, target: Target) -> None:
    """Raise MergeRefused for a text that its column would cut."""
    for name, _ in staged.columns:
        kind = target.columns[name].type
        if kind.removesuffix("[]") not in CUT:
            continue
        cut = first_lossy(connection, staged, target, name)
        if cut is not None:
            raise MergeRefused(
                f'{staged.target}: {cut} in "{name}" would be cut, because the column is {kind}: shorten it in your '
                f"code, or make the column "
                "text"
            )


def beyond(connection: psycopg.Connection[Any], staged: Staged, target: Target) -> str:
    """Return a text about a value that is out of its column's range, with the key of its row. Empty if none is found."""
    for name, numbers in _numbers(staged, target):
        limits = _limits(target.columns[name])
        if limits is None:
            continue
        low, high, places = limits
        query = sql.SQL(
            "select round(s.n, {places}), {shown} from ({numbers}) s "
            "where round(s.n, {places}) not between {low} and {high} order by 2 limit 1"
        ).format(places=places, shown=_shown(staged), numbers=numbers, low=low, high=high)
        found = connection.execute(query).fetchone()
        if found is not None:
            number, row = found
            where = f" of the row {row}" if row and name not in staged.key else ""
            return f'"{name}"{where} would be {number:f}, and its column is {target.columns[name].stored}: widen it: '
    return ""


def _numbers(staged: Staged, target: Target) -> Iterator[tuple[str, sql.Composable]]:
    """Yield for each column a query of its numbers with the keys of their rows. A mode that adds has a second query, of
    the sums with the target's numbers."""
    keys = [sql.Identifier(name) for name in staged.key]
    values = [name for name, _ in staged.columns if name not in staged.key]
    numeric = {name for name, kind in staged.columns if kind in INTEGERS or DECIMAL.fullmatch(kind)}
    rows = sql.SQL("{} where {} and {} is not true").format(
        staged.identifier, is_winner(staged), sql.Identifier(TOUCHED)
    )
    for name in [*staged.key, *values]:
        if name in numeric:
            shown = sql.SQL(", ").join([*keys, sql.SQL("{}::numeric as n").format(sql.Identifier(name))])
            yield name, sql.SQL("select {} from {}").format(shown, rows)
    if not staged.behaviour.sums:
        return
    same = sql.SQL(" and ").join(
        sql.SQL("t.{0} = s.{0}::{1}").format(sql.Identifier(name), sql.SQL(target.columns[name].type))
        for name in staged.key
    )
    for name in values:
        if name in numeric:
            column, key = sql.Identifier(name), sql.SQL(", ").join(keys)
            held = sql.SQL("select t.{} from {} t where {}").format(column, target.identifier, same)
            total = sql.SQL("coalesce(({})::numeric, 0) + sum({}::numeric)").format(held, column)
            yield (
                name,
                sql.SQL("select {0}, {1} as n from (select * from {2}) s group by {0}").format(
                    key, total, rows
                ),
            )


def _shown(staged: Staged) -> sql.Composable:
    """Return an expression for the key of a row as text."""
    parts = [sql.SQL("{} || {}::text").format(f"{name}=", sql.Identifier(name)) for name in staged.key]
    return sql.SQL("concat_ws(', ', {})").format(sql.SQL(", ").join(parts)) if parts else sql.SQL("''::text")


def _limits(column: Column) -> tuple[Decimal, Decimal, int] | None:
    """Return the lowest and the highest number of a column, and the decimal places to which it rounds."""
    if column.type in BITS:
        bits = BITS[column.type]
        return Decimal(-(2 ** (bits - 1))), Decimal(2 ** (bits - 1) - 1), 0
    match = PRECISION.fullmatch(column.stored)
    if match is None:
        return None
    precision, places = int(match[1]), int(match[2])
    high = Decimal(10) ** (precision - places) - Decimal(10) ** -places
    return -high, high, places
