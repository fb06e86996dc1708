"""The formats of lake tables. A format is a module with the functions of ``Format``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import psycopg

from airflow_pgchange.errors import InvalidArgument, PgChangeError
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.error_text import described
from airflow_pgchange.feeds.outputs import Output
from airflow_pgchange.lake.commit_numbers import one_write
from airflow_pgchange.lake.staged_files import Files, StagedFiles, Version
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge_modes import Mode

if TYPE_CHECKING:
    import pyarrow as pa

MODULES = {
    "delta": "airflow_pgchange.lake.delta",
    "iceberg": "airflow_pgchange.lake.iceberg",
    "remote iceberg": "airflow_pgchange.lake.iceberg.remote_catalog",
}
"""The module of each ``kind`` of table. Importing it raises ExtraMissing if its library is not installed."""


LONGEST_LOCATION = 1500
"""How many characters the URI of an asset may have in Airflow."""


class FileWriter(Protocol):
    """All that a process needs to write files of a table. A writer is pickled and sent to executors."""

    @property
    def location(self) -> str:
        """The location of the table as a URI."""

    def write(self, rows: Iterable[pa.RecordBatch], gone: Iterable[pa.RecordBatch] = ()) -> Files:
        """Write rows, and the keys of rows to delete, into new files of the table. ``rows`` are read before ``gone``."""


class Format(Protocol):
    """How the rows of a batch become a version of a table."""

    def writer_of(
        self,
        connection: psycopg.Connection[Any],
        batch: Batch,
        lake: Any,
        rows: pa.Schema,
        *,
        key: tuple[str, ...],
        mode: Mode,
    ) -> FileWriter:
        """Return the writer of files with rows of this schema. The names of the files contain the attempt that has
        written them.

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


def prepared(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: LakeTable,
    rows: pa.Schema,
    *,
    key: tuple[str, ...],
    mode: Mode,
    evolve: bool = False,
    note: Callable[[str, str], None] = lambda step, how_far: None,
) -> tuple[FileWriter, StagedFiles]:
    """Return the writer of files with rows of this schema, and the description of the staged files, which is still
    empty.

    ``evolve``: the table first gets the columns that it lacks, and ``note`` is called with them. Raises the errors of
    ``Format.evolve`` and ``Format.writer_of``, and InvalidArgument if the location of the table is too long for an asset.
    """
    format = format_of(lake)
    if evolve and (names := format.evolve(connection, lake, rows, key=key, mode=mode)):
        note(f"added columns to {lake}", ", ".join(names))
    writer = format.writer_of(connection, batch, lake, rows, key=key, mode=mode)
    if len(writer.location) > LONGEST_LOCATION:
        raise InvalidArgument(
            f"{lake}: the location of the table has {len(writer.location):,} characters as a URI, but an asset of "
            f"Airflow may have only {LONGEST_LOCATION:,}. Nothing was written; make the table at a shorter location"
        )
    return writer, StagedFiles(lake, key, mode, batch.id, batch.attempt)


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> Output:
    """Make staged files a version of their table, in the consumer transaction.

    Raises MergeRefused, and StagingOutdated if the table was altered since they were written, or if they are too old.
    """
    staged.check_life()
    with one_write(connection, staged.lake):
        version = format_of(staged.lake).commit(connection, batch, staged)
    return Output(staged.target, staged.rows, version.name, version.location)


def format_of(lake: LakeTable) -> Format:
    """Return the format of a table. Raises ExtraMissing if its library is not installed, and InvalidArgument if the
    library's configuration is wrong."""
    try:
        return cast(Format, import_module(MODULES[lake.kind]))
    except PgChangeError:
        raise
    except Exception as error:  # noqa: BLE001
        # PyIceberg reads its configuration when it is imported. The cause is left out, because its text may have secrets.
        raise InvalidArgument(
            f"{lake}: the library of the table's format cannot be imported: {described(error)}: correct its "
            "configuration, such as .pyiceberg.yaml"
        ) from None
