"""The queries of a merge over the staged rows of winning tasks."""

from __future__ import annotations

from typing import Literal

from psycopg import sql

from airflow_pgchange.results.staging import TOUCHED, Staged
from airflow_pgchange.results.target import Target
from airflow_pgchange.results.value_checks import BITS, is_winner

COMMA = sql.SQL(", ")
Which = Literal["is not true", "is not null", "is true"]
"""The condition on the column ``TOUCHED``."""


def insert(staged: Staged, target: Target) -> sql.Composed:
    """Return the query that writes the rows. The mode defines what it does with a key that the target has."""
    key, values, query = key_names(staged), value_names(staged), plain_insert(staged, target)
    conflict = staged.behaviour.conflict
    if conflict is None:
        return query
    updates = COMMA.join(sql.SQL(conflict.assigned).format(value) for value in values)
    action = sql.SQL("update set {}").format(updates) if values else sql.SQL("nothing")
    return sql.SQL("{} on conflict ({}) do {}").format(query, COMMA.join(key), action)


def plain_insert(staged: Staged, target: Target) -> sql.Composed:
    """Return the query that inserts the rows. It fails for a key that the target has."""
    # Override system values: a key may be an identity that is always generated.
    return sql.SQL("insert into {} as t ({}) overriding system value {}").format(
        target.identifier,
        COMMA.join([*key_names(staged), *value_names(staged)]),
        rows_to_insert(staged, target),
    )


def rows_to_insert(staged: Staged, target: Target) -> sql.Composed:
    """Select the rows to insert, in the order of their keys."""
    key, values = COMMA.join(key_names(staged)), value_names(staged)
    return sql.SQL(staged.behaviour.selected).format(
        key=key,
        columns=COMMA.join([*key_names(staged), *values]),
        sums=COMMA.join(sql.SQL("sum({0}) as {0}").format(value) for value in values),
        rows=staged_rows(staged, target),
        order=sql.SQL("order by {}").format(key) if staged.key else sql.SQL(""),
    )


def staged_rows(staged: Staged, target: Target, which: Which = "is not true") -> sql.Composed:
    """Select the rows of winning tasks, cast to the target's types.

    A mirror has rows of three kinds. ``TOUCHED`` is null for rows read without the ids of the batch, false for rows
    read with them, and true for ids without a row. Ids that the target's key cannot hold are left out.
    """
    columns = COMMA.join(
        sql.SQL("{0}::{1} as {0}").format(sql.Identifier(name), sql.SQL(target.columns[name].type))
        for name, _ in staged.columns
    )
    flag = sql.SQL("{} {}").format(sql.Identifier(TOUCHED), sql.SQL(which))
    held = sql.SQL("true") if which == "is not true" else _is_held(staged, target)
    return sql.SQL("select {} from {} where {} and {} and {}").format(
        columns, staged.identifier, is_winner(staged), flag, held
    )


def _is_held(staged: Staged, target: Target) -> sql.Composable:
    """Whether the target's key can hold a touched id. An id that it cannot hold belongs to another table."""
    staged_as = dict(staged.columns)
    held: list[sql.Composable] = [
        sql.SQL("{} between {} and {}").format(sql.Identifier(name), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for name in staged.key
        if staged_as[name] in BITS and (bits := BITS.get(target.columns[name].type)) is not None
    ]
    return sql.SQL(" and ").join(held) if held else sql.SQL("true")


def gone_keys(staged: Staged, target: Target) -> sql.Composed:
    """Select the touched keys that have no row any more."""
    return sql.SQL("select {0} from ({1}) s except select {0} from ({2}) s").format(
        COMMA.join(key_names(staged)), staged_rows(staged, target, "is true"), staged_rows(staged, target)
    )


def key_names(staged: Staged) -> list[sql.Identifier]:
    """Return the columns of the key."""
    return [sql.Identifier(name) for name in staged.key]


def key_is_null(staged: Staged) -> sql.Composed:
    """Return the condition that a column of the key is null."""
    return sql.SQL(" or ").join(sql.SQL("{} is null").format(name) for name in key_names(staged))


def value_names(staged: Staged) -> list[sql.Identifier]:
    """Return the columns that are not in the key."""
    return [sql.Identifier(name) for name, _ in staged.columns if name not in staged.key]
