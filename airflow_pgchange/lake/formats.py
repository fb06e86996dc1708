"""The formats of lake tables. A format is a module with the functions of ``Format``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import psycopg

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.outputs import Output
from airflow_pgchange.lake.numbering import one_write
from airflow_pgchange.lake.staged import Files, StagedFiles, Version
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.modes import Mode

if TYPE_CHECKING:
    import pyarrow as pa

MODULES = {
    "delta": "airflow_pgchange.lake.delta",
    "iceberg": "airflow_pgchange.lake.iceberg",
    "remote iceberg": "airflow_pgchange.lake.iceberg.remote",
}
"""The module of each ``kind`` of table. Importing it raises ExtraMissing if its library is not installed."""


class Place(Protocol):
    """All that a process needs to write files of a table. A place is pickled and sent to executors."""

    def write(self, rows: Iterable[pa.RecordBatch], gone: Iterable[pa.RecordBatch] = ()) -> Files:
        """Write rows, and the keys of rows to delete, into new files of the table. ``rows`` are read before ``gone``."""


class Format(Protocol):
    """How the rows of a batch become a version of a table."""

    def place(
        self,
        connection: psycopg.Connection[Any],
        batch: Batch,
        lake: Any,
        rows: pa.Schema,
        *,
        key: tuple[str, ...],
        mode: Mode,
    ) -> Place:
        """Return the place for files with rows of this schema. The names of the files say which attempt has written them.

        ``connection`` is a connection to the database of the results. Raises MergeRefused if such rows cannot be written
        in this mode exactly as they are, InvalidArgument if there is no such table, and PermissionDenied.
        """

    def evolve(
        self,
        connection: psycopg.Connection[Any],
        lake: Any,
        rows: pa.Schema,
        *,
        key: tuple[str, ...],
        mode: Mode,
    ) -> list[str]:
        """Add the columns that the rows have and the table lacks, each of which may be null, and return their names.

        Raises MergeRefused, and the table stays as it is, if the rows would still not fit it.
        """

    def commit(self, connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Version:
        """Make the files a version of their table, in the consumer transaction.

        Raises MergeRefused, and StagingOutdated if the files no longer fit the table because it was altered.
        Returns the version that has the rows of the batch, which another attempt may have committed.
        """


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Output:
    """Make staged files a version of their table, in the consumer transaction.

    Raises MergeRefused, and StagingOutdated if the table was altered since they were written, or if they are too old.
    """
    staged.check_life()
    with one_write(connection, staged.lake):
        version = format_of(staged.lake).commit(connection, batch, staged)
    return Output(staged.target, staged.rows, version.name, version.location)


def format_of(lake: LakeTable) -> Format:
    """Return the format of a table. Raises ExtraMissing if its library is not installed."""
    return cast(Format, import_module(MODULES[lake.kind]))
