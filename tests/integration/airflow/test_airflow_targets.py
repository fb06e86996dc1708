"""The tables that batches write, as outlets of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from airflow.sdk.execution_time.context import OutletEventAccessors
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.assets.targets import table_asset, target_tables
from airflow_pgchange.feeds import Batch, Change
from tests.airflow_home import uri
from tests.ledger import Connect, audit, make_ledger, operator, writer

Database = psycopg.Connection[Any]
OUTLET = target_tables("audits")


@pytest.fixture
def write(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    make_ledger(connect())
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return writer(connect())


def events(task: Any, error: type[Exception] | None = None) -> dict[str, Any]:
    """Return the asset events that a run of a task adds to its outlet, as extras by URI."""
    found = OutletEventAccessors()
    if error is None:
        task.execute({"outlet_events": found})
    else:
        with pytest.raises(error):
            task.execute({"outlet_events": found})
    return {event.dest_asset_key.uri: event.extra for event in found[OUTLET].asset_alias_events}


def named(db: str, *tables: str) -> set[str]:
    database = str(conninfo_to_dict(db)["dbname"])
    return {table_asset(db, database, "public", table).uri for table in tables}


def test_each_table_that_the_batches_wrote_has_one_event_that_names_them(
    db: str, write: Callable[[int], None]
) -> None:
    write(3)
    found = events(operator("airline", outlets=[OUTLET], limit=2, max_batches=None))
    assert set(found) == named(db, "audit")
    (extra,) = found.values()
    assert (extra["feed"], extra["changes"], len(extra["batch_ids"])) == ("commits:audit/0", 3, 2)


def test_where_nothing_was_ready_there_is_no_event(write: Callable[[int], None]) -> None:
    assert events(operator("airline", outlets=[OUTLET])) == {}


def test_a_failed_run_adds_no_asset_event(write: Callable[[int], None]) -> None:
    def fail(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        audit(batch, changes, connection)
        raise ZeroDivisionError

    write(1)
    assert events(operator("airline", outlets=[OUTLET], process=fail), ZeroDivisionError) == {}


def test_a_feed_that_a_batch_writes_to_is_no_target_but_a_table_is(
    db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    connect().execute("create table notes (id bigint primary key); select revision.track('notes')")

    def also_noted(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        connection.execute("insert into notes values (1)")

    write(1)
    assert set(events(operator("airline", outlets=[OUTLET], process=also_noted))) == named(db, "notes")


def test_tables_of_results_elsewhere_are_those_of_that_database(
    other_db: str, connect_to: Connect, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_to(other_db).execute("create table audit (id bigint primary key, batch uuid)")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", uri(other_db))
    write(1)
    found = events(operator("warehouse", outlets=[OUTLET], source_conn_id="airline"))
    assert set(found) == named(other_db, "audit")
