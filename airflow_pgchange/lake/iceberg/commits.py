"""Commits to Iceberg tables: staged files become a snapshot in the consumer transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table, Transaction

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.lake.iceberg import data_files, pointer, rewriting
from airflow_pgchange.lake.iceberg.names import FileId
from airflow_pgchange.lake.iceberg.refusals import refusals
from airflow_pgchange.lake.staged import StagedFiles, Version
from airflow_pgchange.lake.tables import Iceberg


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Version:
    """Lock the table's pointer, and move it to a snapshot with the staged files.

    The pointer stays locked until the transaction ends. So other writers wait meanwhile, and then read the table again.
    """
    with refusals(staged.lake):
        table = pointer.opened(connection, staged.lake, locked=True)
        told = _told(connection, batch)
        if (staged.files or staged.gone) and not _is_there(table, told):
            with table.transaction() as transaction:
                _add_snapshot(transaction, table, staged, told)
        snapshot = table.current_snapshot()
        return Version(None if snapshot is None else str(snapshot.snapshot_id), table.location())


def _add_snapshot(transaction: Transaction, table: Table, staged: StagedFiles, told: dict[str, str]) -> None:
    files = [data_files.from_json(table.metadata, file) for file in staged.files]
    snapshot = transaction.update_snapshot(snapshot_properties=told)
    if not staged.mode.behaviour.needs_key:
        with snapshot.fast_append() as added:
            added.commit_uuid = FileId(staged.by)
            for file in files:
                added.append_data_file(file)
        return
    gone = [_keys_in(table, path) for path in staged.gone]
    keys = _keys(staged.lake, table, files, staged.key, gone, once=staged.mode.behaviour.one_row_a_key)
    with snapshot.overwrite(FileId(staged.by)) as changed:
        for rewritten in rewriting.without(table, staged.by, keys):
            changed.delete_data_file(rewritten.file)
            for file in rewritten.left:
                changed.append_data_file(file)
        for file in files:
            changed.append_data_file(file)


def _told(connection: psycopg.Connection[Any], batch: Batch) -> dict[str, str]:
    """Return the properties of the batch for the summary of its snapshot."""
    transaction = ask(connection, sql.SQL("select pg_catalog.pg_current_xact_id()::text"))
    return {
        "pgchange.consumer": batch.feed,
        "pgchange.batch": batch.id,
        "pgchange.attempt": str(batch.attempt),
        "pgchange.transaction": transaction,
    }


def _is_there(table: Table, told: Mapping[str, str]) -> bool:
    """Whether another transaction has committed the batch to the table.

    Then the progress, which is in another database, was lost after that commit. Several writes of one transaction are
    several snapshots.
    """
    snapshots = [snapshot.summary for snapshot in table.metadata.snapshots if snapshot.summary is not None]
    return any(
        summary["pgchange.batch"] == told["pgchange.batch"]
        and summary["pgchange.transaction"] != told["pgchange.transaction"]
        for summary in snapshots
    )


def _keys(
    lake: Iceberg,
    table: Table,
    files: Sequence[DataFile],
    key: tuple[str, ...],
    gone: Sequence[pa.Table],
    *,
    once: bool,
) -> pa.Table:
    """The keys of all rows that are written or deleted."""
    kept = rewriting.rows_of(table, [FileScanTask(file) for file in files], key)
    if any(kept.column(name).null_count for name in key):
        raise MergeRefused(f"{lake}: a key holds NULL: drop such rows before merging")
    if once:
        _check_once(lake, kept, key)
    return pa.concat_tables([kept, *(keys.cast(kept.schema) for keys in gone)])


def _check_once(lake: Iceberg, kept: pa.Table, key: tuple[str, ...]) -> None:
    counted = kept.group_by(list(key)).aggregate([([], "count_all")])
    twice = (
        counted.filter(pa.compute.greater(counted.column("count_all"), 1))
        .select(list(key))
        .slice(0, 1)
        .to_pylist()
    )
    if twice:
        named = ", ".join(f"{name}={value}" for name, value in twice[0].items())
        raise MergeRefused(
            f"{lake}: the key {named} comes more than once, so which row should win? Use dropDuplicates or an aggregate "
            "before merging"
        )


def _keys_in(table: Table, path: str) -> pa.Table:
    with table.io.new_input(path).open() as file:
        return pq.read_table(file)
