"""The lineage of batches and backfills for OpenLineage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from airflow.providers.openlineage.utils.utils import translate_airflow_asset
from openlineage.client.event_v2 import Dataset
from openlineage.client.serde import Serde
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange import tubes
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import Batch, Change, CommitFeed, ConsumerTransaction, EventFeed, TubeFeed
from airflow_pgchange.operators import TubeBackfillOperator
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.results.staging import Copied, Staged
from airflow_pgchange.utils import lineage
from tests.airflow_home import uri
from tests.conftest import Role
from tests.ledger import Connect, audit, make_ledger, operator, run, writer
from tests.staging import stage

FEED = ("pgchange://airline", "commits:audit/0")


@pytest.fixture(autouse=True)
def listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "is_on", lambda: True)


@pytest.fixture
def write(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    make_ledger(connect())
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return writer(connect())


def tables(db: str, *names: str) -> list[tuple[str, str]]:
    server = conninfo_to_dict(db)
    return [
        (f"postgres://{server['host']}:{server['port']}", f"{server['dbname']}.public.{name}")
        for name in names
    ]


def names(datasets: list[Dataset]) -> list[tuple[str, str]]:
    return [(each.namespace, each.name) for each in datasets]


def facets(task: Any) -> Any:
    return task.get_openlineage_facets_on_complete(None)


def test_a_batch_goes_from_its_feed_and_its_tables_to_those_that_it_wrote(
    db: str, write: Callable[[int], None]
) -> None:
    """Takes seconds if it is the first test of this file, because OpenLineage is imported."""
    write(3)
    task = operator("airline")
    done = run(task)
    told = facets(task)
    assert names(told.inputs) == [FEED, *tables(db, "ledger")]
    assert names(told.outputs) == tables(db, "audit")
    assert told.inputs[0].inputFacets["inputStatistics"].rowCount == 3
    facet = json.loads(Serde.to_json(told.run_facets["pgchange"]))
    assert (facet["feed"], facet["batches"], facet["changes"]) == ("commits:audit/0", 1, 3)
    assert facet["batch_ids"] == done["batch_ids"]


def test_a_task_that_failed_tells_of_the_batches_that_it_committed(
    db: str, write: Callable[[int], None]
) -> None:
    def fail_then(batch: Batch, changes: Iterator[Change], connection: Any) -> None:
        audit(batch, changes, connection)
        if connection.execute("select count(*) from audit").fetchone() == (3,):
            raise ZeroDivisionError

    write(3)
    task = operator("airline", process=fail_then, limit=2, max_batches=None)
    with pytest.raises(ZeroDivisionError):
        run(task)
    told = facets(task)
    assert told.run_facets["pgchange"].changes == 2
    assert names(told.outputs) == tables(db, "audit")


def test_a_role_that_may_not_see_the_tables_tells_of_the_feed_alone(
    role: Role, connect: Connect, write: Callable[[int], None]
) -> None:
    """Takes seconds if it is the first test of this file, because OpenLineage is imported."""
    consumer = role("consumer")
    connect().execute(f"select pubsub.grant_consumer('{consumer.name}')")
    assert lineage.sources(CommitFeed("audit", 0), consumer.conninfo) == []
    connect().execute(f"grant execute on function revision.tracking() to {consumer.name}")
    assert [name for *_, name in lineage.sources(CommitFeed("audit", 0), consumer.conninfo)] == ["ledger"]


def test_a_feed_that_is_not_of_tables_has_none(db: str) -> None:
    assert lineage.sources(EventFeed("group"), db) == []


def test_a_task_that_did_not_run_tells_nothing() -> None:
    assert facets(operator("airline")) is None


def test_where_nobody_listens_nothing_is_asked(
    write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "is_on", lambda: False)
    task = operator("airline")
    run(task)
    assert facets(task) is None


def test_a_backfill_goes_from_its_tables_to_the_workers_of_its_tube(
    db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    tubes.ensure(connect(), "copies", 2)
    tubes.attach(connect(), "copies", "ledger", shard=0)
    task = TubeBackfillOperator(task_id="t", tube="copies", tables=["ledger"], postgres_conn_id="airline")
    run(task)
    told = facets(task)
    assert names(told.inputs) == tables(db, "ledger")
    assert names(told.outputs) == [("pgchange://airline", f"tube:copies/{worker}") for worker in (0, 1)]
    assert lineage.sources(TubeFeed("copies", 0, 2), db) == [
        (conninfo_to_dict(db)["dbname"], "public", "ledger")
    ]
    assert lineage.sources(TubeFeed("copies", 1, 2), db) == []


@pytest.mark.parametrize(
    "meanwhile",
    [
        "alter table ledger rename to moved",
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()",
    ],
    ids=["renamed", "lost"],
)
def test_a_backfill_that_is_whole_is_whole_though_nothing_can_be_told_of_it(
    connect: Connect, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    write(3)
    tubes.ensure(connect(), "copies", 1)
    tubes.attach(connect(), "copies", "ledger", shard=0)
    monkeypatch.setattr(lineage, "is_on", lambda: connect().execute(meanwhile))
    task = TubeBackfillOperator(task_id="t", tube="copies", tables=["ledger"], postgres_conn_id="airline")
    assert run(task) == {"ledger": 3}
    assert facets(task) is None


class Merging(SparkBatchOperator):
    """Spark's operator, as if an application had staged results.

    It stages a table for each item of ``copied``, which describes the frame that the application copied.
    """

    def __init__(self, copied: Sequence[Copied | None], **arguments: Any) -> None:
        super().__init__(task_id="t", application="nobody.py", postgres_conn_id="airline", **arguments)
        self.copied = copied

        self._arguments.check = lambda *_: None  # type: ignore[method-assign]

    def _stage(self, transaction: ConsumerTransaction, batch: Batch, context: Any) -> tuple[Staged, ...]:
        with psycopg.connect(transaction.connection.info.dsn, autocommit=True) as connection:
            return tuple(
                replace(
                    stage(
                        connection,
                        "public.copy",
                        ("id",),
                        "replace",
                        {"id": "bigint", "amount": "integer"},
                        [(number, 10)],
                        batch=batch,
                    ),
                    copied=copied,
                )
                for number, copied in enumerate(self.copied)
            )


def columns_told(task: Any) -> Any:
    """Return each column of the only table that was written, with the columns of its lineage."""
    (output,) = facets(task).outputs
    facet = (output.facets or {}).get("columnLineage")
    told = {} if facet is None else json.loads(Serde.to_json(facet))["fields"]
    return {
        column: [(one["namespace"], one["name"], one["field"]) for one in of["inputFields"]]
        for column, of in told.items()
    }


LEDGER = Copied("public", "ledger", ("id", "amount"))


@pytest.mark.parametrize(
    ("copied", "columns"),
    [
        ([LEDGER], ["id", "amount"]),
        ([None], []),
        ([LEDGER, None], []),
        ([Copied("public", "stranger", ("id",))], []),
    ],
    ids=["as it is", "by the application", "by both", "of a table that the feed does not tell of"],
)
def test_a_column_is_told_to_be_of_that_whose_rows_were_copied_and_of_nothing_else(
    db: str,
    connect: Connect,
    write: Callable[[int], None],
    copied: Sequence[Copied | None],
    columns: Sequence[str],
) -> None:
    """Takes seconds if it is the first test of this file, because OpenLineage is imported."""
    connect().execute("create table copy (id bigint primary key, amount integer)")
    write(1)
    task = Merging(copied=copied, feed=CommitFeed("audit", 0))
    run(task)
    ((namespace, name),) = tables(db, "ledger")
    assert columns_told(task) == {column: [(namespace, name, column)] for column in columns}


@pytest.mark.parametrize("conditions", [{}, {"min_changes": 1000, "max_age": 30}])
def test_an_asset_of_a_feed_is_the_dataset_that_its_batches_read(conditions: dict[str, Any]) -> None:
    found = translate_airflow_asset(feed_asset(CommitFeed("audit", 0), "airline", **conditions), None)
    assert (found.namespace, found.name) == FEED


def test_without_a_transport_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not lineage.is_on()


def test_without_the_provider_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "airflow.providers.openlineage", None)
    assert not lineage.is_on()
