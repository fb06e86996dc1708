"""Commits to Delta tables: staged files become a version of their table, and then the progress is committed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import psycopg
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from airflow_pgchange.errors import ServerUnavailable, StagingOutdated
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.commit_numbers import next_number
from airflow_pgchange.lake.copy_on_write import merged
from airflow_pgchange.lake.delta import copy_on_write, data_files, object_store, schema_check
from airflow_pgchange.lake.delta.data_files import Layout
from airflow_pgchange.lake.delta.error_translation import refusals
from airflow_pgchange.lake.delta.log import Write
from airflow_pgchange.lake.staged_files import StagedFiles, Version
from airflow_pgchange.lake.tables import Delta

CONFLICTS = 20
"""The number of tries of a commit if other writers commit first. Then the batch is tried again."""


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Version:
    """Make the staged files a version of their table, unless an earlier attempt on the batch has done so.

    Another attempt may still be running. So the log is read before each try, and the try fails if another writer has
    committed since.
    """
    lake = cast(Delta, staged.lake)
    with refusals(lake):
        table = object_store.opened(lake)
        write = Write(lake, batch, next_number(connection, str(table.metadata().id)))
        version = table.version() if staged.is_empty else _committed(table, staged, write)
    return Version(str(version), object_store.uri(lake))


def _committed(table: DeltaTable, staged: StagedFiles, write: Write) -> int:
    """Commit the files, or find the commit of an earlier attempt. Return the version of the table."""
    for _ in range(CONFLICTS):
        version = write.version_in(table)
        if version is not None:
            return version
        if _is_committed(table, staged, write):
            return table.version() + 1
        table = object_store.opened(write.lake)
    raise ServerUnavailable(
        f"{write.lake}: batch {write.batch.id} was not committed, because other writers were faster {CONFLICTS} "
        f"times: let them commit less often, or try again"
    )


def _is_committed(table: DeltaTable, staged: StagedFiles, write: Write) -> bool:
    """Try to commit the next version; False if another writer has committed it since the table was read."""
    layout = schema_check.layout(write.lake, table, staged.by)
    if any(file["definition"] != layout.definition for file in staged.files):
        raise StagingOutdated(
            f"{write.lake}: the table was altered since the files were written: nothing was committed, and the batch is "
            "tried again"
        )
    schema_check.check_table(write.lake, table, staged.mode)
    actions = list(_actions(table, layout, staged))
    try:
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            list(layout.partitioning),
            commit_properties=write.properties(),
        )
    except CommitFailedError:
        return False
    return True


def _actions(table: DeltaTable, layout: Layout, staged: StagedFiles) -> Iterator[AddAction | RemoveAction]:
    """Return the files that the commit adds and the files that it removes."""
    if not staged.mode.behaviour.needs_key:
        yield from map(data_files.action, staged.files)
        return
    data = copy_on_write.DataFiles(table, layout)
    old, new = merged(data, staged, list(map(data.new, staged.files)))
    yield from map(data.removal, old)
    yield from (data_files.action(file.described) for file in new)
