"""Read a batch: in Python, in a Spark driver or in an executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg.rows import dict_row

from airflow_pgchange.errors import BatchIncomplete, PermissionDenied, UnsupportedType
from airflow_pgchange.feeds.batch import Batch, Change, Partition
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.feed import Feed, partitions
from airflow_pgchange.feeds.key_columns import KeyColumn, found_by, parts
from airflow_pgchange.feeds.keys import BIGINT, Key, value
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.feeds.watched_connection import role_of

STANDBY_PATIENCE = 60.0
"""Seconds that a reader waits until a standby has replayed the changes of the batch."""


CURRENT = "select {selected} from ({changes}) q left join {table} t on {found}"
CURRENT_WANTED = """
with pgchange_batch as materialized ({changes}), pgchange_wanted as materialized (
    select distinct {wanted_id} as id
    from {judged}({tube}, {name}::regclass, array(select {batch_id} from pgchange_batch b)) w(id))
select {selected}
from pgchange_batch q
left join (pgchange_wanted w join {table} t on {found}) on w.id = q.id
"""
KEY_PART = "pgchange_key_{}"
"""A column of a change's id as the table's column holds it, counted from 1."""


def current_rows(
    partition: Partition,
    table: str,
    key: Sequence[KeyColumn],
    columns: Sequence[str] | None = None,
    *,
    tube: str | None = None,
    named: bool = False,
    typed: bool = False,
) -> Partition:
    """Return a query for the current rows of ``table`` that a partition's changes name: one row for each change.

    A change whose row is gone has NULL in ``key`` and in every other column, so the count stays right. ``named`` adds the
    change's id as the first column, ``pgchange_id``. ``typed`` adds the columns of the id as the last, ``pgchange_key_1``
    and so on, unless it is a number. With ``tube``, a row for which the tube's predicate is false counts as gone.
    """
    names = None if columns is None else dict.fromkeys([*(column.name for column in key), *columns])
    selected: list[sql.Composable] = (
        [sql.SQL("t.*")] if names is None else [sql.Identifier("t", name) for name in names]
    )
    if named:
        selected.insert(0, sql.SQL("q.id as pgchange_id"))
    if typed:
        selected += _key_parts(key)
    several = len(key) > 1
    query = sql.SQL(CURRENT if tube is None else CURRENT_WANTED).format(
        selected=sql.SQL(", ").join(selected),
        changes=_verbatim(partition.query),
        tube=tube,
        judged=sql.Identifier("tube", "wanted" if key[0].type is None else "wanted_keys"),
        name=table_identifier(table).as_string(None),
        table=table_identifier(table),
        found=found_by("t", key, parts("q.id" if tube is None else "w.id", len(key))),
        batch_id=sql.SQL("b.id::pg_catalog.text" if several else "b.id"),
        wanted_id=sql.SQL("w.id::pg_catalog.text[]" if several else "w.id"),
    )
    return Partition(query.as_string(None), partition.count)


def with_key_parts(partition: Partition, key: Sequence[KeyColumn]) -> Partition:
    """Return a query for the changes of a partition with the columns of their ids, as ``current_rows`` adds them."""
    query = sql.SQL("select {} from ({}) q").format(
        sql.SQL(", ").join([sql.SQL("q.*"), *_key_parts(key)]), _verbatim(partition.query)
    )
    return Partition(query.as_string(None), partition.count)


def _key_parts(key: Sequence[KeyColumn]) -> list[sql.Composed]:
    return [
        sql.SQL("{} as {}").format(column.value(text), sql.Identifier(KEY_PART.format(number)))
        for number, (column, text) in enumerate(zip(key, parts("q.id", len(key)), strict=True), 1)
        if column.type is not None
    ]


def check_whole(connection: psycopg.Connection[Any], table: str) -> None:
    """Raise PermissionDenied if row security hides rows of ``table``, because hidden rows would count as gone."""
    query = sql.SQL("select pg_catalog.row_security_active({}::regclass)")
    if ask(connection, query.format(table_identifier(table).as_string(None))):
        raise PermissionDenied(
            f"row security hides rows of {table} from {role_of(connection)}, and they would count as gone. Read it as a "
            f"role with bypassrls, or as its owner if row security is not forced"
        )


def caught_up(connection: psycopg.Connection[Any], lsn: str | None) -> None:
    """Wait until this server has replayed ``lsn``. Raises BatchIncomplete if that takes too long."""
    if lsn is None:
        return
    replayed = sql.SQL(
        "select not pg_catalog.pg_is_in_recovery() or pg_catalog.pg_last_wal_replay_lsn() >= {}::pg_catalog.pg_lsn"
    ).format(lsn)
    deadline, pause = time.monotonic() + STANDBY_PATIENCE, 0.01
    while connection.execute(replayed).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise BatchIncomplete(
                f"the standby has not replayed {lsn} within {STANDBY_PATIENCE:g} s: read from a server that lags less"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


@contextmanager
def connected(source: str, lsn: str | None) -> Iterator[psycopg.Connection[Any]]:
    """Open a connection to a server of ``source`` that has replayed ``lsn``, and so has the rows of the batch. Raises
    BatchIncomplete if a standby lags for too long."""
    with connect(source) as connection:
        caught_up(connection, lsn)
        yield connection


def expect(partition: Partition, count: int) -> None:
    """Raise BatchIncomplete unless a partition's reader found as many changes as the claim had counted."""
    if count != partition.count:
        raise BatchIncomplete(
            f"a partition of the batch has {partition.count} changes, its reader found {count}: "
            "nothing was written, and the batch is tried again"
        )


def changes(connection: psycopg.Connection[Any], feed: Feed, batch: Batch) -> Generator[Change, None, None]:
    """Stream the batch's changes in order. Raises BatchIncomplete after the last change if any is missing,
    UnsupportedType for a change with bytes that are not valid text."""
    last: Key = "none"
    with translated(), _bytes_named(lambda: f"{feed.name}: the change after {last}"):
        caught_up(connection, batch.lsn)
        for partition in partitions(feed, batch, 1):
            count = 0
            with connection.cursor(row_factory=dict_row) as cursor:
                for row in cursor.stream(_verbatim(partition.query)):
                    count += 1
                    change = change_of(feed, batch, row)
                    last = change.id
                    yield change
            expect(partition, count)


def change_of(feed: Feed, batch: Batch, row: Mapping[str, Any]) -> Change:
    """Return the change in a row of a partition of the batch, with its id as a ``Key``."""
    change = feed.change(row)
    return change if batch.key == BIGINT else replace(change, id=value(change.id, batch.key))


@contextmanager
def _bytes_named(change: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except errors.CharacterNotInRepertoire as error:
        raise UnsupportedType(
            f"{change()} has bytes that are not valid text ({error.diag.message_primary}), which a database in SQL_ASCII "
            "accepts: correct them there"
        ) from error


def _verbatim(query: str) -> sql.SQL:
    return sql.SQL(query)
