"""The operators that install and maintain the schemas, run as a worker runs them, on a real server."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.extensions import EXTENSIONS
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.operators.schema import InstallSchemaOperator
from tests.airflow_home import uri
from tests.ledger import Connect, operator, run


def test_installing_the_schemas_twice_does_nothing(bare_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BARE", uri(bare_db))
    task = InstallSchemaOperator(task_id="install", postgres_conn_id="bare")
    first = run(task)
    assert first
    assert run(task) == first


def test_a_schema_that_the_server_cannot_have_is_in_the_log_of_the_task(
    bare_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BARE", uri(bare_db))
    monkeypatch.setitem(EXTENSIONS, "mbus", "hstore_of_another_server")
    task = InstallSchemaOperator(task_id="install", postgres_conn_id="bare", without=["topology"])
    with patch.object(task.log, "warning") as warning:
        found = run(task)
    told = [call.args[1] for call in warning.call_args_list if call.args[0] == "%s was left out: %s"]
    assert told == ["mbus"]
    assert [state["system"] for state in found if state["left_out"]] == ["mbus"]
    assert "topology" not in {state["system"] for state in found}


def test_maintenance_makes_partitions_ahead(conn_id: str, connect: Connect) -> None:
    """Maintenance creates five partitions after the current partition, each of a million transaction ids."""
    connection = connect()
    uppers = "select upper from revision.partitions() order by upper"
    before = [upper for (upper,) in connection.execute(uppers).fetchall()]
    report = run(MaintenanceOperator(task_id="keep", postgres_conn_id=conn_id, ahead=5))
    after = [upper for (upper,) in connection.execute(uppers).fetchall()]
    ((million,),) = connection.execute("select pg_current_xact_id()::text::bigint / 1000000").fetchall()
    assert after == [(million + n) * 1_000_000 for n in range(1, 7)]
    assert [line for line in report["done"] if "partition" in line] == [
        f"added partition commit_queue_{upper - 1_000_000} up to transaction {upper}"
        for upper in after[len(before) :]
    ]


def test_maintenance_names_who_holds_consumers_back(
    own_database: str, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(own_database))
    connection, holder = connect_to(own_database), connect_to(own_database, autocommit=False)
    connection.execute("select pubsub.register('audit', 0, in_order => true)")
    holder.execute("select pg_current_xact_id()")
    connection.execute("insert into revision.commit default values")
    report = run(MaintenanceOperator(task_id="keep", postgres_conn_id="airline"))
    assert any(f"process {holder.info.backend_pid}" in line for line in report["attention"]), report


def test_maintenance_names_a_batch_that_fails_again_and_again(
    conn_id: str, write: Callable[[int], None]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    write(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            run(operator(conn_id, process=fail))
    report = run(MaintenanceOperator(task_id="keep", postgres_conn_id=conn_id))
    assert any("has failed 3 times" in line for line in report["attention"]), report


def test_maintenance_captures_partitions_that_came_later(conn_id: str, connect: Connect) -> None:
    connect().execute(
        "create table big (id bigint primary key) partition by range (id);"
        "select revision.track('big');"
        "create table big_1 partition of big for values from (0) to (10)"
    )
    report = run(MaintenanceOperator(task_id="keep", postgres_conn_id=conn_id))
    assert any("big" in line for line in report["done"]), report


def test_maintenance_of_a_database_without_our_schemas_does_nothing(
    bare_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BARE", uri(bare_db))
    report = run(MaintenanceOperator(task_id="keep", postgres_conn_id="bare"))
    assert report == {"done": [], "attention": []}


def test_a_span_that_is_none_is_answered_with_how_to_write_one(conn_id: str) -> None:
    with pytest.raises(InvalidArgument, match="30 days"):
        run(MaintenanceOperator(task_id="keep", postgres_conn_id=conn_id, retention="soon"))
