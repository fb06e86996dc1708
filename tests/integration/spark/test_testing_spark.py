"""Functions of Spark jobs called with given changes, and the examples of the guide to testing that need Spark."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import psycopg
import pytest
from airflow.sdk import DAG, task
from pyspark.sql import SparkSession

from airflow_pgchange.errors import InvalidArgument, MergeRefused, UnsupportedType
from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TubeFeed
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.spark.job import Job
from airflow_pgchange.testing import run_spark_once
from tests.airflow_home import uri
from tests.readme import Guide
from tests.spark_session import batch_of, spark_session, track

COMMITS = CommitFeed("test", 0)
PAYMENTS = [(1, "ann", 100), (2, "bob", 50), (3, "ann", -30)]
SCHEMA = "id long, account string, cents long"


@pytest.fixture
def spark() -> SparkSession:
    return spark_session()


def pairs(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_the_example_of_the_guide(spark: SparkSession) -> None:
    """Takes seconds: Airflow is imported, and Spark starts."""
    guide = Guide("docs/how-to/testing.md", "unused", None)
    for section in ("A batch without a server", "Spark"):
        guide.run(section)
    guide.names["test_payments_are_summed_for_each_account"](spark)


def test_the_changes_have_the_columns_and_types_of_the_data_source(
    spark: SparkSession, db: str, connect: Any
) -> None:
    """Takes seconds if it is the first test of this file: Airflow is imported, and Spark starts."""
    connection = connect()
    connection.execute("create table t (id bigint primary key)")
    feed = track(connection, "t")
    connection.execute("insert into t values (7)")
    seen: list[Any] = []
    with batch_of(feed, db) as job:
        seen.append(job.changes().schema)
    run_spark_once(lambda job: seen.append(job.changes().schema), [7], feed=feed, spark=spark)
    assert seen[0] == seen[1]


def test_rows_come_once_for_each_change_and_what_is_gone_is_told(spark: SparkSession) -> None:
    """Takes seconds, because Spark computes."""
    tables = {"payment": spark.createDataFrame(PAYMENTS, SCHEMA)}
    seen: dict[str, Any] = {}

    def work(job: Job) -> None:
        seen["rows"] = pairs(job.rows("payment", key="id"))
        seen["columns"] = pairs(job.rows("payment", key="id", columns=["cents"]))
        seen["routed"] = pairs(job.routed("payment", key="id", bucket="id % 3"))
        seen["gone"] = pairs(job.gone("payment", key="id"))
        job.mirror("payment", into="copies.payment", key="id")
        job.merge(job.rows("payment", key="id").dropDuplicates(), into="c", key="id", mode="mirror")

    done = run_spark_once(work, [1, 3, 3, 9], feed=COMMITS, spark=spark, tables=tables)
    assert seen["rows"] == seen["routed"] == [PAYMENTS[0], PAYMENTS[2], PAYMENTS[2]]
    assert (seen["columns"], seen["gone"]) == ([(1, 100), (3, -30), (3, -30)], [(9,)])
    for merged in done.merged:
        assert merged.gone is not None
        assert (merged.key, merged.mode, pairs(merged.gone)) == (("id",), "mirror", [(9,)])
        assert set(pairs(merged.frame)) == {PAYMENTS[0], PAYMENTS[2]}


def test_a_job_finds_rows_by_keys_of_several_columns(spark: SparkSession) -> None:
    """Takes seconds, because Spark computes."""
    rows = [(1, date(2024, 1, 2), b"\1", "a"), (2, date(2024, 1, 2), b"\2", "b")]
    tables = {"seat": spark.createDataFrame(rows, "no int, day date, code binary, who string")}
    key = ["no", "day", "code"]

    def work(job: Job) -> None:
        assert pairs(job.changes().select("id"))[1] == (["3", "2024-01-02", "\\x03"],)
        assert pairs(job.gone("seat", key)) == [(["3", "2024-01-02", "\\x03"],)]
        job.mirror("seat", into="copies.seat", key=key)
        job.merge(job.rows("seat", key), into="copies.seat", key=key, mode="mirror")

    given = [(2, "2024-01-02", "\\x02"), (3, "2024-01-02", "\\x03")]
    done = run_spark_once(
        work, given, feed=COMMITS, spark=spark, tables=tables, key=["bigint", "date", "bytea"]
    )
    for merged in done.merged:
        assert merged.gone is not None
        assert pairs(merged.frame) == [rows[1]]
        assert pairs(merged.gone) == [(3, date(2024, 1, 2), b"\3")]


def test_a_job_of_a_tube_sees_its_shards(spark: SparkSession) -> None:
    """Takes seconds, because Spark computes."""
    flight = Attached("copies", 1, "public", "flight", ("no",))
    other = Attached("copies", 5, "public", "other", ("id",))
    tables = {"public.flight": spark.createDataFrame([(1, "UA")], "no long, carrier string")}

    def work(job: Job) -> None:
        assert job.shards() == [1, 2]
        assert job.attached() == [flight]
        assert pairs(job.changes(2).select("id")) == [(8,)]
        job.mirror(flight, into="{tube}.{table}")

    given = [{"id": 1, "shard": 1}, {"id": 9, "shard": 1}, {"id": 8, "shard": 2}]
    (merged,) = run_spark_once(
        work, given, feed=TubeFeed("copies"), spark=spark, tables=tables, attached=[flight, other]
    ).merged
    assert (merged.into, merged.key, pairs(merged.frame)) == ("copies.flight", ("no",), [(1, "UA")])
    assert merged.gone is not None
    assert pairs(merged.gone) == [(9,)]


def test_payloads_and_messages_are_columns(spark: SparkSession) -> None:
    def payloads(job: Job) -> None:
        frame = job.payloads("carrier string, delay int").select("topic", "carrier", "delay")
        job.merge(frame, into="delays", key="carrier", mode="replace")

    events = [{"topic": "flight", "payload": {"carrier": "UA", "delay": 5}}, {"topic": "none"}]
    (merged,) = run_spark_once(payloads, events, feed=EventFeed("g"), spark=spark).merged
    assert {tuple(row) for row in merged.frame.collect()} == {("flight", "UA", 5), ("none", None, None)}

    def messages(job: Job) -> None:
        rows = [(row.data, row.added.astimezone(UTC)) for row in job.messages().collect()]
        assert rows == [({"a": "1", "b": None}, datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC))]

    run_spark_once(messages, [{"data": {"a": "1", "b": None}}], feed=QueueFeed("q"), spark=spark)


def test_a_call_that_the_operator_would_refuse_is_refused(spark: SparkSession) -> None:
    def no_key(job: Job) -> None:
        job.merge(job.changes().select("id"), into="t", key="account", mode="add")

    def no_type(job: Job) -> None:
        job.merge(job.changes().selectExpr("id", "struct(id) as all"), into="t", key="id", mode="replace")

    def no_mode(job: Job) -> None:
        job.merge(job.changes(), into="t", key="id", mode="upsert")

    def no_table(job: Job) -> None:
        job.rows("payment", key="id")

    def no_tube(job: Job) -> None:
        job.attached()

    expected: list[tuple[Any, type[Exception], str]] = [
        (no_key, MergeRefused, 't: the frame lacks "account" of the key'),
        (no_type, UnsupportedType, 'column "all" is struct<id:bigint>'),
        (no_mode, InvalidArgument, "mode must be one of add"),
        (no_table, InvalidArgument, r"give its rows, as in tables=\{'payment': frame\}"),
        (no_tube, InvalidArgument, "is a commit feed: tables are attached to tubes"),
    ]
    for work, kind, told in expected:
        with pytest.raises(kind, match=told):
            run_spark_once(work, [1], feed=COMMITS, spark=spark)
    with pytest.raises(InvalidArgument, match="a function alone has no feed: give feed="):
        run_spark_once(no_key, [1], spark=spark)


def test_the_function_of_a_dag_is_called_with_its_arguments(spark: SparkSession) -> None:
    with DAG("d") as dag:

        @task.pgchange_spark(feed=COMMITS, postgres_conn_id="shop")
        def double(job: Job, factor: int, into: str) -> None:
            job.merge(
                job.changes().selectExpr("id", f"id * {factor} as n"), into=into, key="id", mode="replace"
            )

        double(2, into="{{ params.table }}")

    (merged,) = run_spark_once(dag, [3], spark=spark, context={"params": {"table": "doubles"}}).merged
    assert (merged.into, pairs(merged.frame)) == ("doubles", [(3, 6)])


def test_results_are_merged_into_postgresql_as_the_operator_does(
    spark: SparkSession, db: str, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection: psycopg.Connection[Any] = connect()
    connection.execute(
        "create table balance (account text primary key, cents bigint); insert into balance values ('ann', 1);"
        "create table copy (id bigint primary key, account text); insert into copy values (9, 'x')"
    )
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(db))
    tables = {"payment": spark.createDataFrame(PAYMENTS, SCHEMA)}

    def work(job: Job) -> None:
        sums = job.rows("payment", key="id").groupBy("account").agg({"cents": "sum"}).toDF("account", "cents")
        job.merge(sums, into="balance", key="account", mode="add")
        job.mirror("payment", into="copy", key="id", evolve=True)

    done = run_spark_once(
        work, [1, 2, 3, 9], feed=COMMITS, spark=spark, tables=tables, postgres_conn_id="shop"
    )
    assert done.merged == ()
    assert connection.execute("select * from balance order by account").fetchall() == [
        ("ann", 71),
        ("bob", 50),
    ]
    assert connection.execute("select * from copy order by id").fetchall() == PAYMENTS

    def misfit(job: Job) -> None:
        job.merge(job.changes().select("id"), into="balance", key="id", mode="replace")

    with pytest.raises(MergeRefused, match="balance"):
        run_spark_once(misfit, [1], feed=COMMITS, spark=spark, postgres_conn_id="shop")
    assert connection.execute(
        "select count(*) from pg_tables where schemaname = 'pgchange_staging'"
    ).fetchone() == (0,)
