"""Find files of attempts on batches that no snapshot of an Iceberg table names: the attempt failed, or the snapshot has
expired."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider

from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg import file_names
from airflow_pgchange.lake.iceberg.metadata_pointer import version_of


@dataclass(frozen=True)
class Orphan:
    """A file that no snapshot names. ``attempt`` has written it; None for a metadata file, because its name does not
    contain the attempt."""

    attempt: Attempt | None
    bytes: int
    _files: FileSystem
    _path: str

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._path)


def latest_version(table: Table) -> int:
    """Return the number of the latest metadata file in the folder of the table."""
    _, metadata = _folders(table)
    return max((version_of(info.base_name) for _, info in _walk(table, metadata)), default=-1)


def orphans(table: Table, older_than: timedelta) -> Iterator[Orphan]:
    """Find files that our attempts wrote more than ``older_than`` ago, and that no snapshot and no log of the table
    names.

    Folders are listed one by one. Memory holds the listing of one folder, and a number for each file that the table
    names.
    """
    before = datetime.now(UTC) - older_than
    named = {hash(name) for name in _named(table)}
    for folder in _folders(table):
        for files, info in _walk(table, folder):
            attempt = file_names.attempt_of(info.base_name, table.metadata)
            is_ours = attempt is not None or file_names.is_metadata(info.base_name, table.metadata)
            if is_ours and info.mtime < before and hash(info.base_name) not in named:
                yield Orphan(attempt, info.size, files, info.path)


def _named(table: Table) -> Iterator[str]:
    """Yield the names, without folders, of all files that a snapshot or the log of the table names."""
    for path in _paths(table):
        yield path.rpartition("/")[2]


def _paths(table: Table) -> Iterator[str]:
    yield table.metadata_location
    for logged in table.metadata.metadata_log:
        yield logged.metadata_file
    read = set()
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in read:
                read.add(manifest.manifest_path)
                yield manifest.manifest_path
                for entry in manifest.fetch_manifest_entry(table.io):
                    yield entry.data_file.file_path


def _folders(table: Table) -> tuple[str, str]:
    """Return the folders of the data files and of the metadata."""
    locations = load_location_provider(table.metadata.location, table.metadata.properties)
    return locations.data_path, locations.metadata_path


def _walk(table: Table, folder: str) -> Iterator[tuple[FileSystem, FileInfo]]:
    """Yield all files below a folder, each with its file system."""
    scheme, host, path = PyArrowFileIO.parse_location(folder, table.io.properties)
    files = PyArrowFileIO(table.io.properties).fs_by_scheme(scheme, host)
    waiting = [path]
    while waiting:
        for info in files.get_file_info(FileSelector(waiting.pop(), allow_not_found=True)):
            if info.type == FileType.Directory:
                waiting.append(info.path)
            else:
                yield files, info
