"""What is done with a lake from time to time: files of attempts that failed are removed, old snapshots expire."""

from __future__ import annotations

import time
from dataclasses import replace

import pyarrow as pa
import pytest

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake import formats, iceberg, write
from airflow_pgchange.lake.iceberg.names import METADATA
from airflow_pgchange.lake.names import Attempt
from airflow_pgchange.lake.rows import write_marked
from airflow_pgchange.lake.staged import LIFE, StagedFiles
from airflow_pgchange.results.modes import Mode
from airflow_pgchange.results.staging import TOUCHED
from tests.lakes import PAYMENTS, TABLE, payments
from tests.staging import BATCH

FIVE = payments(*((number, "a", number) for number in range(1, 6)))
GONE = payments((1, None, None)).append_column(TOUCHED, pa.array([True]))


def files_in(lake):
    return {str(path) for path in lake.folder.rglob("*") if path.is_file()}


def staged(connection, batch=BATCH, rows=GONE):
    """The files of an attempt to mirror rows, by default without the first row."""
    place = iceberg.place(connection, batch, TABLE, PAYMENTS, key=("id",), mode=Mode.MIRROR)
    files = write_marked(place, ("id",), rows.to_batches())
    return StagedFiles(TABLE, ("id",), Mode.MIRROR, batch.id, batch.attempt).of(files)


def test_every_file_that_is_written_says_which_attempt_has_written_it(lake, connection):
    lake.table()
    before = files_in(lake)
    batch = replace(BATCH, id="0a/b c", attempt=12)
    with connection.transaction():
        write(connection, batch, TABLE, FIVE)
        iceberg.commit(connection, batch, staged(connection, batch))
    new = files_in(lake) - before
    metadata = {path for path in new if path.endswith(".metadata.json")}
    assert (len(metadata), {METADATA in path for path in metadata}) == (2, {True})
    assert {Attempt.in_name(path) for path in new - metadata} == {Attempt("0a-b-c", 12)}
    assert {path.rsplit(".", 1)[-1] for path in new} == {"json", "avro", "parquet"}
    assert len(new - metadata) == 3 + 2 + 2 + 1
    assert not {Attempt.in_name(path) for path in before} - {None}


def test_files_that_may_have_been_removed_are_not_committed(lake, connection):
    lake.table()
    old = replace(staged(connection), began=time.time() - LIFE.total_seconds() - 1)
    with pytest.raises(
        MergeRefused, match="begun 2 days ago, and are kept for 2 days before they are committed"
    ):
        formats.commit(connection, BATCH, old)
