"""The examples of the guide to tables of a lake, run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from airflow.sdk import DAG
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.lake import write
from tests import airflow_home, deltas
from tests.lakes import HAS_SQL_CATALOG, PAYMENTS, TABLE, Lake, payments
from tests.readme import blocks, track_payments
from tests.spark_session import batch_of
from tests.staging import BATCH

airflow_home.prepare()

PAGE = "docs/how-to/lake.md"
THREE = [(1, "ann", 100), (2, "bob", 50), (3, "ann", -30)]


def example(part: str) -> str:
    """Return the example in Python that contains this text."""
    return next(text for text in blocks("python", PAGE) if part in text)


def test_the_function_of_the_guide_adds_a_column(catalog, db):
    names = {}
    exec(example("append_with_notes"), names)
    in_a_batch(names["append_with_notes"], db)
    assert [row[-1] for row in rows(catalog)] == ["checked"] * 3


def test_the_maintenance_of_the_guide_finds_the_table(catalog, db, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", airflow_home.uri(db))
    names = {}
    exec(example("LakeMaintenanceOperator"), names)
    (task,) = names["maintenance_of_the_lake"]().tasks
    assert task.execute({}) == {
        "table": "lake.sales.payment",
        "expired": 0,
        "files": 0,
        "bytes": 0,
        "leftovers": [],
    }


def test_the_settings_of_the_guide_reach_a_bucket(connection, db, s3_server, tmp_path, monkeypatch):
    settings = blocks("yaml", PAGE)[0]
    for shown, here in (
        ("https://s3.eu-west-1.amazonaws.com", s3_server.settings["s3.endpoint"]),
        ("eu-west-1", s3_server.settings["s3.region"]),
    ):
        settings = settings.replace(shown, here)
    (tmp_path / ".pyiceberg.yaml").write_text(settings)
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    catalog = Lake(db, f"s3://{s3_server.bucket()}/warehouse", s3_server.settings)
    catalog.table()
    with connection.transaction():
        write(connection, BATCH, TABLE, payments((1, "ann", 100)))
    assert catalog.rows() == [{"id": 1, "account": "ann", "cents": 100}]


@pytest.mark.skipif(not HAS_SQL_CATALOG, reason="the REST catalog of the tests needs SQLAlchemy 2")
def test_the_settings_of_the_guide_reach_another_catalog(connection, rest, tmp_path, monkeypatch):
    settings, names = blocks("yaml", PAGE)[1], {}
    exec(example('catalog="company"'), names)
    rest.catalog.create_table("sales.payment", PAYMENTS)
    (tmp_path / ".pyiceberg.yaml").write_text(settings.replace("https://catalog.example.com", rest.uri))
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    with connection.transaction():
        write(connection, BATCH, names["TABLE"], payments((1, "ann", 100)))
    assert rest.catalog.load_table("sales.payment").scan().to_arrow().num_rows == 1


def test_the_example_of_the_guide_writes_each_batch_into_a_delta_table(connect, db, tmp_path):
    names = {}
    for part in ("payments_by_python", "DeltaTable.create", "TABLE = Delta"):
        exec(example(part).replace("/data/lake", str(tmp_path)), names)
    track_payments(connect())
    process(names["payments_by_python"](), db)
    assert [row["id"] for row in deltas.rows(names["TABLE"])] == [1, 2, 3]


def process(dag: DAG, db: str) -> None:
    """Process a batch with the only task of a DAG."""
    (task,) = dag.tasks
    in_a_batch(task.python_callable, db)


def in_a_batch(function: Callable[..., None], db: str) -> None:
    """Call the function of a batch as its operator would."""
    with ConsumerTransaction(CommitFeed("lake", 1), db) as transaction:
        batch = transaction.claim()
        transaction.ack(lambda connection: function(batch, transaction.changes(), connection))


@pytest.fixture
def catalog(db: str, connect, tmp_path: Path):
    """The catalog that the guide creates, and the tutorial's payments."""
    if not HAS_SQL_CATALOG:
        pytest.skip("the guide makes its table with PyIceberg's SqlCatalog, which needs SQLAlchemy 2")
    track_payments(connect())
    server, names = conninfo_to_dict(db), {}
    address = f"{server['user']}@{server['host']}:{server['port']}/{server['dbname']}"
    made = example("create_namespace").replace("localhost/shop", address).replace("/data/lake", str(tmp_path))
    exec(made, names)
    return names["catalog"]


def rows(catalog) -> list[tuple[int, str, int]]:
    found = catalog.load_table("sales.payment").scan().to_arrow().sort_by("id").to_pylist()
    return [tuple(row.values()) for row in found]


def test_the_function_of_the_guide_writes_each_payment(catalog, db: str) -> None:
    names = {}
    exec(example("payments_by_python"), names)
    process(names["payments_by_python"](), db)
    assert rows(catalog) == THREE


def test_the_dag_of_the_guide_appends_each_payment(catalog, db: str) -> None:
    names = {}
    exec(example("payments_in_the_lake"), names)
    (task,) = names["payments_in_the_lake"]().tasks
    with batch_of(names["PAYMENTS"], db) as job:
        task.python_callable(job)
    assert rows(catalog) == THREE
