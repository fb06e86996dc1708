"""A lake on S3: which processes reach it, how long a task waits for it, and where its secrets do not appear."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, replace

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.lake import iceberg, write
from airflow_pgchange.lake.iceberg import metadata_pointer
from airflow_pgchange.lake.staged_files import StagedFiles
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.spark.poison_batch import is_of_the_content
from tests import s3
from tests.lakes import PAYMENTS, TABLE, payments
from tests.proxy import proxy_before
from tests.silence import ended
from tests.staging import BATCH

pytestmark = pytest.mark.parametrize("lake", ["S3"], indirect=True)
ROWS = payments((1, "a", 1))


@pytest.fixture
def writer(lake, connection):
    """Return a writer for a table to which rows can be appended."""
    lake.table()
    return iceberg.writer_of(connection, BATCH, TABLE, PAYMENTS, key=(), mode=Mode.APPEND)


def written(connection):
    with connection.transaction():
        return write(connection, BATCH, TABLE, ROWS)


def test_files_are_reached_by_pyarrow_without_further_packages(writer, connection):
    assert isinstance(metadata_pointer.opened(connection, TABLE).io, PyArrowFileIO)


@pytest.mark.parametrize("patience", [{}, {"s3.request-timeout": "1"}], ids=["default", "1 s"])
def test_a_store_that_says_nothing_fails_the_task(writer, connection, s3_server, monkeypatch, patience):
    """Takes seconds without work: PyArrow waits three times, by default for 3 s."""
    with proxy_before(s3_server.port) as proxy:
        settings = {"s3.endpoint": f"http://127.0.0.1:{proxy.port}", **patience}
        for name, value in s3.environment(settings).items():
            monkeypatch.setenv(name, value)
        silent = replace(writer, properties={**writer.properties, **settings})
        proxy.fall_silent()
        began = time.monotonic()
        error = (
            ended(lambda: silent.write(ROWS.to_batches()), within=20)
            if patience
            else ended(lambda: written(connection), within=20)
        )
    assert time.monotonic() - began > 2
    assert isinstance(error, OSError)
    # The driver sees only the text of an executor's error.
    assert not is_of_the_content(RuntimeError(f"OSError: {error}"))


def test_secrets_are_in_no_manifest_no_log_and_no_error(writer, connection, s3_server, caplog):
    caplog.set_level(logging.DEBUG)
    files = writer.write(ROWS.to_batches())
    staged = StagedFiles(TABLE, (), Mode.APPEND, BATCH.id, BATCH.attempt).of(files)
    s3_server.files.delete_dir_contents(writer.location.removeprefix("s3://").split("/")[0])
    errors = [ended(lambda: written(connection))]
    denied = replace(
        writer, properties={**writer.properties, "s3.endpoint": f"{writer.properties['s3.endpoint']}/no"}
    )
    errors.append(ended(lambda: denied.write(ROWS.to_batches())))
    assert [type(error) for error in errors] == [ServerUnavailable, OSError]
    shown = [repr(writer), json.dumps(asdict(staged)), *map(str, errors), *map(repr, errors), caplog.text]
    assert not [text for text in shown if s3.SECRET in text or s3.KEY in text]
