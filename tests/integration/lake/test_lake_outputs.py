"""The tables of a lake that a batch wrote, as assets, in lineage, and on the page."""

from __future__ import annotations

import psycopg
import pytest
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_pgchange.assets.targets import target_tables
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, TubeFeed
from airflow_pgchange.lake import formats, write
from airflow_pgchange.plugins.datamodels import Output
from airflow_pgchange.plugins.history import history
from airflow_pgchange.utils import lineage
from tests.airflow_home import uri
from tests.deltas import DeltaLake
from tests.lakes import TABLE, Lake, payments, set_up
from tests.ledger import make_ledger, operator, writer
from tests.staging import BATCH
from tests.tubes import attach, make

OUTLET = target_tables("lake")


def append(batch, changes, connection) -> None:
    write(connection, batch, TABLE, payments(*((change.id, "a", 1) for change in changes)))


@pytest.fixture
def task(db, connect, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    monkeypatch.setattr(lineage, "is_on", lambda: True)
    make_ledger(connect())
    writer(connect())(3)
    return operator("airline", process=append, outlets=[OUTLET], limit=2, max_batches=None)


def test_a_table_is_an_asset_and_a_dataset_by_its_location_with_its_last_snapshot(db, tmp_path, task):
    table = Lake(db, tmp_path).table()
    events = OutletEventAccessors()
    task.execute({"outlet_events": events})
    snapshot = str(table.refresh().current_snapshot().snapshot_id)
    (event,) = events[OUTLET].asset_alias_events
    assert event.dest_asset_key.uri == table.location()
    assert (event.extra["table"], event.extra["version"]) == (str(TABLE), snapshot)
    (dataset,) = task.get_openlineage_facets_on_complete(None).outputs
    assert (dataset.namespace, dataset.name) == ("file", table.location().removeprefix("file://"))
    assert dataset.facets["version"].datasetVersion == snapshot


def test_page_and_log_have_the_targets_of_each_batch_with_rows_and_snapshot(db, tmp_path, caplog):
    caplog.set_level("INFO")
    table = Lake(db, tmp_path).table()
    set_up(db)
    feed = CommitFeed("lake", 0)
    with ConsumerTransaction(feed, db) as transaction:
        batch = transaction.claim()
        transaction.ack(lambda connection: append(batch, transaction.changes(), connection))
    with psycopg.connect(db) as connection:
        (attempt,) = history(feed.kind, feed.name, (connection,)).attempts
    snapshot = str(table.refresh().current_snapshot().snapshot_id)
    assert f"lake.sales.payment: 10 rows written, version {snapshot}" in caplog.messages
    assert attempt.outputs == [
        Output(target=str(TABLE), rows=10, version=snapshot, location=table.location())
    ]


def test_targets_of_results_elsewhere_are_noted_with_the_progress(db, connect, other_db, tmp_path, caplog):
    caplog.set_level("INFO")
    Lake(other_db, tmp_path).table()
    connection = connect()
    connection.execute("create table change (id bigint generated always as identity primary key)")
    make(connection, "copies")
    attach(connection, "change", "copies")
    connection.execute("insert into change select from generate_series(1, 10)")
    feed = TubeFeed("copies")
    with ConsumerTransaction(feed, other_db, source=db) as transaction:
        batch = transaction.claim()
        transaction.ack(lambda connection: append(batch, transaction.changes(), connection))
    assert caplog.text.count("lake.sales.payment: 10 rows written") == 1
    (attempt,) = history(feed.kind, feed.name, (connection,)).attempts
    assert [(output.target, output.rows) for output in attempt.outputs] == [(str(TABLE), 10)]


@pytest.mark.parametrize("format", [Lake, DeltaLake])
def test_a_location_that_is_too_long_for_an_asset_is_refused_before_a_file_is_written(
    db, tmp_path, format, monkeypatch
):
    monkeypatch.setattr(formats, "LONGEST_LOCATION", len(tmp_path.as_uri()))
    lake = Lake(db, tmp_path) if format is Lake else DeltaLake(tmp_path)
    lake.table()
    with (
        psycopg.connect(db) as connection,
        pytest.raises(InvalidArgument, match=r"the location of the table has \d+ characters"),
    ):
        write(connection, BATCH, lake.into, payments((1, "a", 1)))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("noted", ["", "[1]", '[{"target": "t"}]', '{"target": "t"}', '[{"rows": 1}]'])
def test_a_list_of_targets_that_somebody_made_up_stops_neither_ack_nor_page(db, noted):
    set_up(db)
    feed = CommitFeed("lake", 0)
    with ConsumerTransaction(feed, db) as transaction:
        transaction.claim()
        setting = "select set_config('pgchange.outputs', %s, true)"
        transaction.ack(lambda connection: connection.execute(setting, [noted]))
    with psycopg.connect(db) as connection:
        (attempt,) = history(feed.kind, feed.name, (connection,)).attempts
    assert (attempt.outputs, attempt.acked_at is not None) == ([], True)
