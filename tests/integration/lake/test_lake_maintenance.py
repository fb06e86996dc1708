"""Maintenance of a lake: files of failed attempts are removed, and old snapshots expire."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow.fs import FileSelector, LocalFileSystem

from airflow_pgchange.errors import InvalidArgument, Refused, StagingOutdated
from airflow_pgchange.lake import formats, iceberg, maintain, write
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg import file_names, maintenance, metadata_pointer
from airflow_pgchange.lake.iceberg.orphans import orphans
from airflow_pgchange.lake.rows import write_marked
from airflow_pgchange.lake.staged_files import LIFE, StagedFiles
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.staging import TOUCHED
from tests.lakes import EACH_STORE, PAYMENTS, TABLE, payments
from tests.staging import BATCH

NOW, DAY = timedelta(), 24 * 3600
FIVE = payments(*((number, "a", number) for number in range(1, 6)))
MARKED = payments((2, "b", 0), (1, None, None)).append_column(TOUCHED, pa.array([None, True]))
SECOND, FAILED = replace(BATCH, id="second", attempt=1), replace(BATCH, id="another", attempt=3)


@pytest.fixture
def files(lake, request):
    """A function: the paths of all files of the lake."""
    is_local = isinstance(lake.folder, Path)
    system = LocalFileSystem() if is_local else request.getfixturevalue("s3_server").files
    folder = str(lake.folder).removeprefix("s3://")
    return lambda: {
        info.path for info in system.get_file_info(FileSelector(folder, recursive=True)) if info.is_file
    }


@pytest.fixture
def connection(connect):
    return connect()


def staged(connection, batch, rows=MARKED):
    """Write the files of an attempt that mirrors rows."""
    writer = iceberg.writer_of(connection, batch, TABLE, PAYMENTS, key=("id",), mode=Mode.MIRROR)
    files = write_marked(writer, ("id",), rows.to_batches())
    return StagedFiles(TABLE, ("id",), Mode.MIRROR, batch.id, batch.attempt).of(files)


def committed(connection, batch=BATCH, rows=FIVE, **options):
    with connection.transaction():
        write(connection, batch, TABLE, rows, **options)


def test_every_file_that_is_written_says_which_attempt_has_written_it(lake, connection, files):
    table, before = lake.table(), files()
    batch = replace(BATCH, id="0a/b c", attempt=12)
    with connection.transaction():
        write(connection, batch, TABLE, FIVE)
        iceberg.commit(connection, batch, staged(connection, batch))
    new = files() - before
    ours = {path: file_names.attempt_of(path, table.metadata) for path in new}
    metadata = {path for path in new if file_names.is_metadata(Path(path).name, table.metadata)}
    assert {ours[path] for path in new - metadata} == {Attempt("0a-b-c", 12)}
    assert sorted(Path(path).suffix for path in new) == [".avro"] * 5 + [".json"] * 2 + [".parquet"] * 4
    assert len(metadata) == 2
    assert not any(
        file_names.attempt_of(path, table.metadata) or file_names.is_metadata(Path(path).name, table.metadata)
        for path in before
    )


def test_a_transaction_of_several_commits_that_is_rolled_back_is_no_other_catalog(lake, connection):
    lake.table()
    with connection.transaction(force_rollback=True):
        for number in range(3):
            write(connection, BATCH, TABLE, payments((number, "a", 1)))
    committed(connection)
    assert maintain(connection, TABLE, dry_run=True).files == 0
    with connection.transaction(force_rollback=True):
        for number in range(3):
            write(connection, SECOND, TABLE, payments((number, "a", 1)))
    assert maintain(connection, TABLE, dry_run=True).files == 0


def test_files_that_may_have_been_removed_are_not_committed(lake, connection):
    lake.table()
    old = replace(staged(connection, BATCH), began=time.time() - LIFE.total_seconds() - 1)
    with pytest.raises(StagingOutdated, match="begun 2 days ago, but may be committed only for 2 days"):
        formats.commit(connection, BATCH, old)


@EACH_STORE
def test_only_files_of_failed_attempts_are_removed(lake, connection, files):
    table = lake.table()
    committed(connection)
    table.refresh().append(FIVE)
    with connection.transaction():
        iceberg.commit(connection, SECOND, staged(connection, SECOND))
    kept, rows = files(), lake.rows()
    with connection.transaction(force_rollback=True):
        iceberg.commit(connection, FAILED, staged(connection, FAILED))
    # Files with the keys of rows to delete are useless once these rows are deleted.
    keys = {path for path in kept if "/gone-" in path}
    left = files() - kept | keys
    reports = [
        maintenance.remove_orphans(connection, TABLE, NOW, dry_run=dry_run)
        for dry_run in (True, False, False)
    ]
    assert files() == kept - keys
    assert reports[0] == reports[1]
    assert reports[2] == ()
    found = {(leftover.batch, leftover.attempt): leftover.files for leftover in reports[0]}
    assert found == {("second", 1): 1, ("another", 3): len(left) - 2, (None, None): 1}
    assert all(leftover.bytes > 0 for leftover in reports[0])
    assert lake.rows() == rows
    for snapshot in table.refresh().snapshots():
        table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()


def test_young_files_stay_and_no_file_is_removed_that_an_attempt_may_commit(lake, connection, files):
    lake.table()
    young, old = staged(connection, BATCH), staged(connection, FAILED)
    for path in (old.files[0]["path"], *old.gone):
        os.utime(path.removeprefix("file://"), (time.time() - 3.1 * DAY,) * 2)
    before = files()
    report = maintain(connection, TABLE)
    assert [(left.batch, left.attempt, left.files) for left in report.leftovers] == [("another", 3, 2)]
    assert (report.files, report.expired) == (2, 0)
    assert len(before - files()) == 2
    with connection.transaction():
        formats.commit(connection, BATCH, young)
    with pytest.raises(InvalidArgument, match="older_than must be a length of time from 3 days"):
        maintain(connection, TABLE, older_than="2 days")


def test_files_of_other_tables_in_the_same_folder_stay(lake, connection, files):
    table = lake.table(properties={"write.data.path": (lake.folder / "all").as_uri()})
    lake.catalog.drop_table(TABLE.table)
    staged_before = files()
    lake.table(properties={"write.data.path": (lake.folder / "all").as_uri()})
    other = file_names.FileId(Attempt("another", 1), table.metadata)
    (lake.folder / "all").mkdir(exist_ok=True)
    (lake.folder / "all" / f"00000-0-{other}.parquet").touch()
    committed(connection)
    assert maintenance.remove_orphans(connection, TABLE, NOW) == ()
    assert files() > staged_before


def test_nothing_is_removed_where_another_catalog_commits_to_the_table(lake, connection, files):
    """This protects the original database if maintenance runs in a copy of it."""
    lake.table()
    committed(connection)
    (location,) = connection.execute("select metadata_location from iceberg_tables").fetchone()
    for number in range(2):
        committed(connection, replace(BATCH, id=f"batch {number}"))
    connection.execute("update iceberg_tables set metadata_location = %s", [location])
    before = files()
    with pytest.raises(Refused, match="at version 1 here, and its folder has a metadata file of version 3"):
        maintenance.remove_orphans(connection, TABLE, NOW)
    assert files() == before


def test_a_file_that_another_maintenance_has_removed_is_no_error(lake, connection):
    lake.table()
    staged(connection, BATCH)
    found = list(orphans(metadata_pointer.opened(connection, TABLE), NOW))
    for orphan in (*found, *found):
        orphan.remove()
    assert (len(found), list(orphans(metadata_pointer.opened(connection, TABLE), NOW))) == (2, [])


def snapshots(table):
    return [snapshot.summary["pgchange.batch"] for snapshot in table.refresh().snapshots()]


def test_old_snapshots_expire_with_their_files(lake, connection, files):
    table = lake.table()
    for number in range(2):
        committed(connection, replace(BATCH, id=f"batch {number}"), payments((number, "a", 1)))
    committed(connection, replace(BATCH, id="third"), payments((1, "b", 1)), mode="replace", key="id")
    table.refresh().append(payments((9, "other", 1)))
    rows = lake.rows()
    with table.refresh().manage_snapshots() as refs:
        refs.create_tag(table.snapshots()[1].snapshot_id, "kept")
    assert maintain(connection, TABLE, snapshot_retention="3 days").expired == 0
    for dry_run in (True, False):
        assert maintenance.expire(connection, TABLE, NOW, dry_run=dry_run) == 2
    assert snapshots(table) == ["batch 1", None]
    # Left are the lists of manifests of both snapshots, and the third snapshot's manifest of deleted files.
    left = maintenance.remove_orphans(connection, TABLE, NOW)
    assert {each.batch: each.files for each in left} == {"batch-0": 1, "third": 2}
    assert lake.rows() == rows
    assert table.refresh().scan(snapshot_id=table.snapshots()[0].snapshot_id).to_arrow().num_rows == 2
    with pytest.raises(InvalidArgument, match="snapshot_retention must be a length of time from 3 days"):
        maintain(connection, TABLE, snapshot_retention="1 day")


def test_expiry_is_a_commit_of_postgresql(lake, connection):
    table = lake.table()
    for number in range(3):
        committed(connection, replace(BATCH, id=f"batch {number}"))
    with connection.transaction(force_rollback=True):
        assert maintenance.expire(connection, TABLE, NOW) == 2
    assert len(snapshots(table)) == 3
