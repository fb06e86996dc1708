"""Find rows that a trigger or a rule of a target has kept from being written or deleted, by counting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.results.column_checks import ADDITIVE
from airflow_pgchange.results.merge_modes import Conflict
from airflow_pgchange.results.staging import Staged
from airflow_pgchange.results.target import Column, Target

AND, COMMA = sql.SQL(" and "), sql.SQL(", ")
KEPT_OUT = (
    "a trigger or a rule of the table kept {them} out, so nothing was written. Drop it, merge into a table that "
    "accepts all rows, or filter such rows before the merge"
)
KEPT_IN = (
    "a trigger or a rule of the table kept {them}, so nothing was written. Drop it, or use another mode than mirror. "
    "To note deleted rows, use a trigger after delete"
)
_TREE = """
with recursive tree(oid) as (
    select pg_catalog.to_regclass({})::pg_catalog.oid
    union
    select i.inhrelid from tree as t join pg_catalog.pg_inherits as i on i.inhparent = t.oid
)
"""
_KEEPS = """
select exists (
    select from tree as t join pg_catalog.pg_class as c on c.oid = t.oid
    where c.relkind = 'f'
       or exists (select from pg_catalog.pg_rewrite as r where r.ev_class = c.oid and r.ev_type = '4' and r.is_instead)
       -- Triggers before delete for each row have bits 0, 1 and 3.
       or exists (select from pg_catalog.pg_trigger as g where g.tgrelid = c.oid and g.tgtype & 11 = 11))
"""
_INTO_CHILDREN = """
select coalesce(pg_catalog.sum(pg_catalog.pg_stat_get_xact_tuples_inserted(t.oid)), 0)::bigint
from tree as t join pg_catalog.pg_class as c on c.oid = t.oid
where not c.relispartition and c.relkind = 'r' and c.oid <> pg_catalog.to_regclass({})
"""


def are_missing(
    connection: psycopg.Connection[Any],
    staged: Staged,
    target: Target,
    selected: sql.Composed,
    written: int,
) -> bool:
    """Whether some of the selected rows may not have been written. ``written`` is the number of rows that were."""
    if written >= _counted(connection, selected):
        return False
    conflict = staged.behaviour.conflict
    if conflict is None or not conflict.idempotent:
        return True
    # A trigger may have skipped a row that the table already has.
    return _first(connection, staged, selected, _stands(staged, target, conflict)) is not None


def insert(
    connection: psycopg.Connection[Any],
    staged: Staged,
    target: Target,
    query: sql.Composed,
    selected: sql.Composed,
) -> None:
    """Insert rows. Raise MergeRefused if a row was not written and the table does not have it already.

    The statement returns the keys that were written, which costs more than counting them.
    """
    name = target.identifier.as_string(None)
    in_children = sql.SQL(_TREE + _INTO_CHILDREN).format(name, name)
    before = ask(connection, in_children)
    conflict = staged.behaviour.conflict
    if conflict is None:
        count, first = _counted(connection, selected) - connection.execute(query).rowcount, None
    else:
        count, first = _unwritten(connection, staged, query, selected, _stands(staged, target, conflict))
    # A trigger may redirect rows into a child of the table, as in partitioning by inheritance. Such rows were written.
    if count > ask(connection, in_children) - before:
        were = f"{count:,} of {_counted(connection, selected):,} rows {_was(count)} not written"
        affected = _named(were, first, count)
        raise MergeRefused(
            f"{staged.target}: {affected}: {KEPT_OUT.format(them='it' if count == 1 else 'them')}"
        )


def check_deleted(
    connection: psycopg.Connection[Any], staged: Staged, target: Target, gone: sql.Composed
) -> None:
    """Raise MergeRefused if rows that had to be deleted still exist."""
    if not ask(connection, sql.SQL(_TREE + _KEEPS).format(target.identifier.as_string(None))):
        return
    key = COMMA.join(map(sql.Identifier, staged.key))
    query = sql.SQL(
        "select pg_catalog.count(*) over (), {0} from {1} where ({0}) in ({2}) order by {0} limit 1"
    ).format(key, target.identifier, gone)
    for count, *values in rows(connection, query):
        were = f"{count:,} row{'s' if count > 1 else ''} {_was(count)} not deleted"
        affected = _named(were, _shown(staged, values), count)
        raise MergeRefused(
            f"{staged.target}: {affected}: {KEPT_IN.format(them='it' if count == 1 else 'them')}"
        )


def _unwritten(
    connection: psycopg.Connection[Any],
    staged: Staged,
    query: sql.Composed,
    selected: sql.Composed,
    stands: sql.Composed,
) -> tuple[int, str | None]:
    """Insert rows. Return how many were neither written nor in the table before, and the key of the first."""
    key = [sql.Identifier(name) for name in staged.key]
    # The statement does not see rows that it writes, so it compares with the rows from before.
    checked = sql.SQL(
        "with written as ({query} returning {returned}) "
        "select pg_catalog.count(*) over (), {key} from ({selected}) as s "
        "where not exists (select from written as w where {same}) and not ({stands}) order by {key} limit 1"
    ).format(
        query=query,
        returned=COMMA.join(sql.SQL("t.{}").format(name) for name in key),
        key=COMMA.join(sql.SQL("s.{}").format(name) for name in key),
        selected=selected,
        same=AND.join(sql.SQL("w.{0} = s.{0}").format(name) for name in key),
        stands=stands,
    )
    for count, *values in connection.execute(checked):
        return count, _shown(staged, values)
    return 0, None


def _first(
    connection: psycopg.Connection[Any], staged: Staged, selected: sql.Composed, stands: sql.Composed
) -> Sequence[Any] | None:
    """Return the key of a selected row that the table does not have as it was staged; None if there is none."""
    key = COMMA.join(sql.SQL("s.{}").format(sql.Identifier(name)) for name in staged.key)
    query = sql.SQL("select {} from ({}) as s where not ({}) limit 1")
    return next(iter(rows(connection, query.format(key, selected, stands))), None)


def _stands(staged: Staged, target: Target, conflict: Conflict) -> sql.Composed:
    """Return the condition that writing a row ``s`` would change nothing in the table."""
    same = [sql.SQL("t.{0} = s.{0}").format(sql.Identifier(name)) for name in staged.key]
    for name, _ in staged.columns:
        if name not in staged.key:
            same.append(_unchanged(target.columns[name], conflict))
    return sql.SQL("exists (select from {} as t where {})").format(target.identifier, AND.join(same))


def _unchanged(column: Column, conflict: Conflict) -> sql.Composed:
    name, stored = sql.Identifier(column.name), sql.SQL(column.stored)
    # Compare other types than numbers as text, because some types have no operator for equality. Equal numbers may differ
    # as text.
    shown = sql.SQL("" if column.type in ADDITIVE else "::text")
    return sql.SQL(conflict.unchanged).format(name, stored, shown)


def _counted(connection: psycopg.Connection[Any], selected: sql.Composed) -> int:
    return int(ask(connection, sql.SQL("select pg_catalog.count(*) from ({}) as s").format(selected)))


def _shown(staged: Staged, values: Iterable[Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(staged.key, values, strict=True))


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _named(were: str, first: str | None, count: int) -> str:
    return were if first is None else f"{were}, {first}" + (" among them" if count > 1 else "")
