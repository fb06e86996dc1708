"""Merge staged results into their targets, inside the consumer transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import errors, sql

from airflow_pgchange.errors import MergeRefused, StagingOutdated
from airflow_pgchange.feeds import outputs
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.outputs import Output
from airflow_pgchange.lake import formats
from airflow_pgchange.results import suppressed_writes
from airflow_pgchange.results.column_checks import validate
from airflow_pgchange.results.error_translation import refusals
from airflow_pgchange.results.merge_queries import (
    COMMA,
    gone_keys,
    insert,
    key_is_null,
    key_names,
    plain_insert,
    rows_to_insert,
    staged_rows,
    value_names,
)
from airflow_pgchange.results.staging import ATTEMPT, TOUCHED, Result, Staged, read_manifest, write_manifest
from airflow_pgchange.results.target import Target
from airflow_pgchange.results.value_checks import beyond, check_cut, first_lossy, is_winner

__all__ = ["Result", "Staged", "merge", "read_manifest", "validate", "write_manifest"]

STRINGS = ("character", "bit")


def merge(
    connection: psycopg.Connection[Any],
    batch: Batch,
    manifest: Sequence[Result],
    at: Callable[[str, str], None] = lambda step, how_far: None,
) -> None:
    """Apply the results that this attempt on the batch staged, first those in PostgreSQL, and drop the staging tables.

    Only the rows of winning tasks count, and all of them must be there. Rows are written in the order of their keys, so
    that two merges rarely deadlock. ``at`` is called with each target before its merge. Raises MergeRefused and
    StagingOutdated; the caller must then roll back the transaction.
    """
    for staged in manifest:
        if (staged.batch_id, staged.attempt) != (batch.id, batch.attempt):
            raise MergeRefused(
                f"{staged.target}: staged for attempt {staged.attempt} on batch {staged.batch_id}, "
                f"but this is attempt {batch.attempt} on {batch.id}: it is not merged"
            )
    written = []
    # Merge into PostgreSQL first, because it may refuse rows, and the catalog of a lake may commit at once. Then merge
    # into tables of lakes in the order of their names: two merges that lock the pointers of two tables in different
    # orders deadlock.
    for staged in sorted(manifest, key=lambda each: "" if isinstance(each, Staged) else each.target):
        at(f"merging {staged.target}", f"{staged.rows:,} rows")
        if isinstance(staged, Staged):
            _merge(connection, batch, staged)
            written.append(Output(staged.target, staged.rows))
        else:
            written.append(formats.commit(connection, batch, staged))
    outputs.note(connection, written)


def _merge(connection: psycopg.Connection[Any], batch: Batch, staged: Staged) -> None:
    with refusals(staged):
        columns = dict(staged.columns)
        target = validate(connection, staged.target, staged.key, staged.mode, columns, ids=batch.key)
        kinds = _counted(connection, staged)
        check_cut(connection, staged, target)
        try:
            with connection.transaction() as attempt:
                if _write(connection, staged, target, kinds):
                    return
                raise psycopg.Rollback(attempt)
            with connection.transaction():
                _write(connection, staged, target, kinds, exactly=True)
        except errors.CardinalityViolation:
            if staged.behaviour.one_row_a_key:
                _check_once(connection, staged, target)
            raise
        except errors.NumericValueOutOfRange as error:
            where = beyond(connection, staged, target)
            message = error.diag.message_primary
            raise MergeRefused(f"{staged.target}: {message}: {where}nothing was written") from error


def _write(
    connection: psycopg.Connection[Any],
    staged: Staged,
    target: Target,
    kinds: _Kinds,
    *,
    exactly: bool = False,
) -> bool:
    """Write the rows. Return False if fewer rows were written than staged.

    ``exactly`` then raises MergeRefused instead, with the row that is missing.
    """
    if staged.behaviour.needs_key:
        _check_keys(connection, staged, target, kinds)
    if kinds.ids:
        _delete_gone(connection, staged, target)
        suppressed_writes.check_deleted(connection, staged, target, gone_keys(staged, target))
    query, selected, most = insert(staged, target), rows_to_insert(staged, target), staged.rows - kinds.ids
    if exactly:
        suppressed_writes.insert(connection, staged, target, query, selected)
    else:
        written = _inserted(connection, staged, target, query)
        # If a trigger kept out the first of two rows with one key, the server did not refuse the second.
        if staged.behaviour.one_row_a_key and written != most:
            _check_once(connection, staged, target)
        if written < most and suppressed_writes.are_missing(connection, staged, target, selected, written):
            return False
    connection.execute(sql.SQL("drop table {}").format(staged.identifier))
    return True


def _inserted(
    connection: psycopg.Connection[Any], staged: Staged, target: Target, query: sql.Composed
) -> int:
    """Execute the query, and return the number of rows that it wrote.

    An empty table is filled without ``on conflict`` first, which takes half the time. That fails if two staged rows have
    the same key, or if another transaction has inserted a row since.
    """
    if staged.behaviour.conflict is not None and target.is_empty:
        with suppress(errors.UniqueViolation), connection.transaction():
            return connection.execute(plain_insert(staged, target)).rowcount
    return connection.execute(query).rowcount


@dataclass(frozen=True)
class _Kinds:
    """Numbers of rows of winning tasks."""

    of_no_id: int
    """Rows of a mirror that may not belong to an id of the batch."""
    ids: int
    """Ids of the batch without a row."""
    without_key: int


def _counted(connection: psycopg.Connection[Any], staged: Staged) -> _Kinds:
    query = sql.SQL(
        "select {attempt}, count(*), count(*) filter (where {touched} is null), count(*) filter (where {touched}), "
        "count(*) filter (where {touched} is not true and ({is_null})) from {staged} where {won} group by {attempt}"
    ).format(
        attempt=sql.Identifier(ATTEMPT),
        touched=sql.Identifier(TOUCHED),
        is_null=key_is_null(staged) if staged.key else sql.SQL("false"),
        staged=staged.identifier,
        won=is_winner(staged),
    )
    try:
        rows = connection.execute(query).fetchall()
    except errors.UndefinedTable as error:
        raise StagingOutdated(
            f"{staged.target}: the staging table {staged.table} is gone: the batch is tried again"
        ) from error
    counts = {attempt: count for attempt, count, *_ in rows}
    expected = {attempt: count for attempt, count in staged.winners if count}
    if counts != expected:
        raise StagingOutdated(
            f"{staged.target}: {sum(expected.values())} rows were staged, but {sum(counts.values())} exist, as after a "
            f"crash of the server. Nothing was written, and the batch is tried again"
        )
    return _Kinds(*(sum(column) for column in list(zip(*rows, strict=True))[2:])) if rows else _Kinds(0, 0, 0)


def _check_keys(connection: psycopg.Connection[Any], staged: Staged, target: Target, kinds: _Kinds) -> None:
    if kinds.without_key:
        null = _first(
            connection, staged, target, "select {key} from ({rows}) s where {} limit 1", key_is_null(staged)
        )
        raise MergeRefused(f"{staged.target}: the key {null} has a NULL: drop such rows before merging")
    for name in staged.key:
        column = target.columns[name]
        differs = sql.SQL("{0} <> {0}::{1}").format(sql.Identifier(name), sql.SQL(column.stored))
        rounded = (
            None
            if column.stored == column.type
            else _first(connection, staged, target, "select {key} from ({rows}) s where {} limit 1", differs)
        )
        if column.type == "money":
            rounded = first_lossy(connection, staged, target, name)
        if rounded is not None:
            way = "shorten" if column.type.startswith(STRINGS) else "round"
            raise MergeRefused(
                f'{staged.target}: the key {rounded} would be changed, because "{name}" is {column.stored}. Several '
                f"keys could become the same: {way} it in Spark before merging, or widen the "
                "column"
            )
    if staged.behaviour.one_row_a_key and not value_names(staged):
        _check_once(connection, staged, target)
    if staged.behaviour.deletes_touched and kinds.of_no_id:
        touched = staged_rows(staged, target, "is not null")
        foreign = _first(
            connection,
            staged,
            target,
            "select {key} from ({rows}) s except select {key} from ({}) s limit 1",
            touched,
        )
        if foreign is not None:
            raise MergeRefused(
                f"{staged.target}: the key {foreign} is not an id of this batch's changes. The key of a mirror ends "
                f"with that id; for other keys use replace"
            )


def _check_once(connection: psycopg.Connection[Any], staged: Staged, target: Target) -> None:
    """Raise MergeRefused with a key that was staged twice. Called when the server refused to overwrite a row twice."""
    twice = _first(
        connection, staged, target, "select {key} from ({rows}) s group by {key} having count(*) > 1 limit 1"
    )
    if twice is not None:
        raise MergeRefused(
            f"{staged.target}: the key {twice} was staged more than once, so it is not clear which row is right: use "
            f"dropDuplicates or an aggregate before merging"
        )


def _first(
    connection: psycopg.Connection[Any],
    staged: Staged,
    target: Target,
    query: LiteralString,
    *others: sql.Composable,
) -> str | None:
    """Return the first key that a query over the staged rows finds, as text."""
    key, rows = COMMA.join(key_names(staged)), staged_rows(staged, target)
    row = connection.execute(sql.SQL(query).format(*others, key=key, rows=rows)).fetchone()
    if row is None:
        return None
    return ", ".join(f"{name}={value}" for name, value in zip(staged.key, row, strict=True))


def _delete_gone(connection: psycopg.Connection[Any], staged: Staged, target: Target) -> None:
    """Delete the rows of touched ids that are gone at the source. Rows are locked in the order of keys first."""
    query = sql.SQL(
        "with gone as materialized (select {0} from {1} where ({0}) in ({2}) order by {0} for update) "
        "delete from {1} where ({0}) in (select {0} from gone)"
    )
    connection.execute(
        query.format(COMMA.join(key_names(staged)), target.identifier, gone_keys(staged, target))
    )
