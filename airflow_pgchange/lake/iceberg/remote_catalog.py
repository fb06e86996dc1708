"""Iceberg tables of a catalog that cannot take part in a commit of PostgreSQL, such as REST, Glue or Hive.

The catalog commits first, and then PostgreSQL. Another process may work on the same batch at any time: a retry that
began when a lease or a connection was lost. So the batch is first looked for in the history of the current snapshot,
and the commit requires that this snapshot is still current. If a commit was refused, or its outcome is unknown, the
batch is looked for again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import psycopg
import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import TableRequirement, TableUpdate

from airflow_pgchange.errors import (
    InvalidArgument,
    MergeRefused,
    ServerUnavailable,
)
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.iceberg import metadata_pointer
from airflow_pgchange.lake.iceberg.catalog_errors import DENIED, answers, as_ours, text_of
from airflow_pgchange.lake.iceberg.commits import add_snapshot, current_version
from airflow_pgchange.lake.iceberg.deadline import within
from airflow_pgchange.lake.iceberg.error_translation import refusals
from airflow_pgchange.lake.iceberg.file_writer import FileWriter, writer_in
from airflow_pgchange.lake.iceberg.history import Write, has
from airflow_pgchange.lake.iceberg.schema_evolution import add_columns, lacking
from airflow_pgchange.lake.staged_files import StagedFiles, Version
from airflow_pgchange.lake.tables import RemoteIceberg
from airflow_pgchange.results.merge_modes import Mode

PATIENCE = 60.0
"""Seconds that a catalog may take for an answer."""
PAUSES = (0.1, 0.4, 1.6, 6.4, 0)
"""Seconds after each try of a commit. They vary at random by up to a half, so that two writers do not collide again."""


class Unconfirmed(ServerUnavailable):
    """A commit was refused, or its outcome is unknown."""


class OneTry(NoopCatalog):
    """The catalog of a table, for one try of one commit.

    PyIceberg from 0.12 on repeats a commit that raised CommitFailedException, or deletes its manifests. Both are wrong
    here. The batch must be looked for before another try, and the commit may have been applied if a proxy has sent it
    twice.
    """

    def __init__(self, lake: RemoteIceberg, catalog: Catalog) -> None:
        super().__init__(catalog.name)
        self._lake = lake
        self._catalog = catalog

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit. Raises PermissionDenied, and Unconfirmed for all other errors."""
        try:
            return within(PATIENCE, lambda: self._catalog.commit_table(table, requirements, updates))
        except DENIED as error:
            raise as_ours(self._lake, error) from error
        except Exception as error:
            raise Unconfirmed(text_of(error)) from error


def writer_of(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: RemoteIceberg,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
) -> FileWriter:
    """Return the writer of files with rows of this schema, if they fit the table."""
    with opened(lake) as table:
        if table.metadata.format_version < 2:
            raise MergeRefused(
                f"{lake}: the table is of format version 1, which does not show whether snapshots have expired: set "
                f"its property format-version to 2"
            )
        return writer_in(table, batch, lake, rows, key=key, mode=mode)


def evolve(
    connection: psycopg.Connection[Any],
    lake: RemoteIceberg,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
) -> list[str]:
    """Add the columns that the table lacks, by a commit of the catalog, and return their names."""
    with opened(lake) as table:
        return add_columns(lake, table, rows, key, mode) if lacking(table, rows) else []


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Version:
    """Commit a snapshot with the staged files to the catalog, unless the table has the batch.

    If another writer was faster, the table is read again, so that its rows with the same keys are replaced, too.
    """
    lake, write = cast(RemoteIceberg, staged.lake), None
    with refusals(lake), _opened(lake) as catalog:
        for pause in PAUSES:
            table = _table(catalog, lake)
            write = write or Write.begun(connection, lake, batch, table)
            if staged.is_empty or has(table, write):
                return current_version(table)
            try:
                add_snapshot(table, staged, write)
                return current_version(table)
            except Unconfirmed as error:
                unconfirmed = error
                time.sleep(pause * random.uniform(0.5, 1.5))
    raise ServerUnavailable(
        f"{lake}: the catalog has confirmed none of {len(PAUSES)} tries to commit batch {batch.id}: {unconfirmed}. "
        f"Try the batch again: the table is searched for it first. If other writers were faster each time, let them "
        f"commit less often"
    ) from unconfirmed


@contextmanager
def opened(lake: RemoteIceberg) -> Iterator[Table]:
    """Yield the table at its current snapshot, as its catalog returns it."""
    with _opened(lake) as catalog:
        yield _table(catalog, lake)


@contextmanager
def _opened(lake: RemoteIceberg) -> Iterator[Catalog]:
    settings = metadata_pointer.properties(lake)
    if not settings:
        raise InvalidArgument(
            f"{lake}: PyIceberg's configuration has no catalog {lake.catalog}: write it into the section catalog of "
            f".pyiceberg.yaml, or set environment variables such as PYICEBERG_CATALOG__{lake.catalog.upper()}__URI"
        )
    with answers(lake):
        # A REST catalog may leave out snapshots that no branch names, unless we ask for all.
        complete = {**settings, "snapshot-loading-mode": "all"}
        catalog = within(PATIENCE, lambda: load_catalog(lake.catalog, **complete))
    with catalog:
        yield catalog


def _table(catalog: Catalog, lake: RemoteIceberg) -> Table:
    """Return the table as it is now in the catalog."""
    with answers(lake):
        table = within(PATIENCE, lambda: catalog.load_table((*lake.namespace.split("."), lake.name)))
    metadata_pointer.check_runs_no_code(lake, table.metadata)
    table.catalog = OneTry(lake, catalog)
    return table
