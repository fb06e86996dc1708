"""Commits to Iceberg tables: staged files become a snapshot in the consumer transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import psycopg
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update.snapshot import UpdateSnapshot

from airflow_pgchange.errors import StagingOutdated
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.copy_on_write import merged
from airflow_pgchange.lake.iceberg import copy_on_write, data_files, metadata_pointer
from airflow_pgchange.lake.iceberg.error_translation import refusals
from airflow_pgchange.lake.iceberg.file_names import FileId, attempt_of
from airflow_pgchange.lake.iceberg.history import Write, has
from airflow_pgchange.lake.staged_files import StagedFiles, Version
from airflow_pgchange.lake.tables import Iceberg


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Version:
    """Lock the table's pointer, and move it to a snapshot with the staged files.

    The pointer stays locked until the transaction ends. So other writers wait meanwhile, and then read the table again.
    """
    with refusals(staged.lake):
        table = metadata_pointer.opened(connection, cast(Iceberg, staged.lake), locked=True)
        write = Write.begun(connection, staged.lake, batch, table)
        if not staged.is_empty and not has(table, write):
            add_snapshot(table, staged, write)
        return current_version(table)


def current_version(table: Table) -> Version:
    """Return the current version of a table."""
    snapshot = table.current_snapshot()
    return Version(None if snapshot is None else str(snapshot.snapshot_id), table.location())


def add_snapshot(table: Table, staged: StagedFiles, write: Write) -> None:
    """Commit a snapshot with the staged files. The commit requires that the table is still at the snapshot that was
    read."""
    with table.transaction() as transaction:
        # A person's answer counts for one commit, so remove it.
        if answers := write.answers(table):
            transaction.remove_properties(*answers)
        _change(transaction.update_snapshot(snapshot_properties=write.summary), table, staged)


def _change(snapshot: UpdateSnapshot, table: Table, staged: StagedFiles) -> None:
    if not all(_fits(table.metadata, file) for file in staged.files):
        raise StagingOutdated(
            f"{staged.lake}: the columns or the partitions of the table were changed while the rows were written: "
            "nothing was committed, and the batch is tried again"
        )
    files = [data_files.from_json(table.metadata, file) for file in staged.files]
    if not staged.mode.behaviour.needs_key:
        with snapshot.fast_append() as added:
            added.commit_uuid = FileId(staged.by, table.metadata)
            for file in files:
                added.append_data_file(file)
        return
    data = copy_on_write.DataFiles(table, staged.by)
    old, new = merged(data, staged, list(map(FileScanTask, files)))
    with snapshot.overwrite(FileId(staged.by, table.metadata)) as changed:
        for task in old:
            changed.delete_data_file(task.file)
        for task in new:
            changed.append_data_file(task.file)


def _fits(metadata: TableMetadata, file: Mapping[str, Any]) -> bool:
    """Whether a data file that was written for an earlier version of the table fits the current version.

    Since then only columns that may be null may have been added. A table that was dropped and made again may have other
    columns with the same ids.
    """
    before = [
        field for schema in metadata.schemas if schema.schema_id == file["schema"] for field in schema.fields
    ]
    added = [field for field in metadata.schema().fields if field not in before]
    return (
        bool(before)
        and attempt_of(file["path"], metadata) is not None
        and file["spec"] == metadata.default_spec_id
        and len(added) == len(metadata.schema().fields) - len(before)
        and not any(field.required for field in added)
    )
