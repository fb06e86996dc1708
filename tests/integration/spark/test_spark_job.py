"""A Spark job over batches of the commit queue: reading, staging and faults."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.sql import functions as f

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.spark import table_sink
from airflow_pgchange.spark.read_options import ReadOptions
from airflow_pgchange.spark.session import parallelism
from tests.planes import COUNTS, count_seats, make_planes
from tests.spark_session import batch_of, spark_session, track


@pytest.fixture
def planes(connect):
    """A tracked table of planes and the feed of its changes."""
    connection = connect()
    return connection, make_planes(connection)


def test_a_session_divides_a_batch_as_it_divides_what_else_it_reads():
    """Takes seconds if this test starts the worker's Spark session."""
    assert parallelism(spark_session()) == 2


def ids(frame):
    return sorted(row["id"] for row in frame.collect())


def test_a_batch_is_read_change_by_change(db, planes, path):
    _, feed = planes
    with batch_of(feed, db) as job:
        changes = job.changes()
        assert changes.columns[0] == "id"
        assert ids(changes) == list(range(1, 101))
        assert job.batch.count == 100


def test_a_limited_batch_reads_its_own_changes_and_no_others(db, planes, path):
    _, feed = planes
    seen = []
    for _ in range(4):
        with batch_of(feed, db, limit=30) as job:
            seen += ids(job.rows("public.plane", key="id"))
    assert sorted(seen) == list(range(1, 101))


def test_rows_come_once_for_each_change_that_names_them(db, connect, path):
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    connection.execute("create table note (id bigint primary key, word text)")
    feed = track(connection, "note")
    connection.execute("insert into note values (1, 'once')")
    connection.execute("delete from note")
    connection.execute("insert into note values (1, 'again'), (2, 'two')")
    with batch_of(feed, db) as job:
        assert Counter(row["word"] for row in job.rows("public.note", key="id").collect()) == {
            "again": 2,
            "two": 1,
        }


def test_rows_that_are_gone_are_left_out_and_can_be_counted(db, planes, path):
    connection, feed = planes
    connection.execute("delete from plane where id > 90")
    with batch_of(feed, db) as job:
        assert ids(job.rows("public.plane", key="id")) == list(range(1, 91))
        assert ids(job.gone("public.plane", key="id")) == list(range(91, 101))


def test_only_the_columns_that_are_asked_for_are_read_and_the_key(db, planes, path):
    _, feed = planes
    with batch_of(feed, db) as job:
        assert job.rows("public.plane", key="id", columns=["seats"]).columns == ["id", "seats"]
        assert job.rows("public.plane", key="id", columns=["seats", "id"]).columns == ["id", "seats"]


def test_a_column_that_is_not_there_is_named(db, planes, path):
    _, feed = planes
    with pytest.raises(Exception, match="color"), batch_of(feed, db) as job:
        job.rows("public.plane", key="id", columns=["color"]).collect()


def test_a_key_that_is_not_unique_is_refused_for_what_it_is(db, planes, path):
    connection, feed = planes
    connection.execute("create table leg as select id as plane_id from plane, generate_series(1, 2)")
    with pytest.raises(Exception, match='"plane_id" is not unique in public.leg'), batch_of(feed, db) as job:
        job.rows("public.leg", key="plane_id").collect()


def test_the_data_source_is_there_for_users_of_its_options(db, planes, executors):
    _, feed = planes
    with batch_of(feed, db) as job:
        frame = job.spark.read.format("pgchange").option("table", "public.plane").option("key", "id")
        rows = frame.option("columns", '["tail"]').option("partitions", 3).load()
        assert rows.rdd.getNumPartitions() <= 3
        assert ids(rows) == list(range(1, 101))


@pytest.mark.parametrize(
    "arguments",
    [
        {"table": "t"},
        {"key": "id"},
        {"columns": ("a",)},
        {"which": "gone"},
        {"which": "some", "table": "t", "key": "id"},
    ],
    ids=lambda given: next(iter(given.values())),
)
def test_options_that_make_no_sense_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        ReadOptions(**arguments)


def test_counts_that_batches_add_up_equal_the_table(db, planes, path):
    """Takes seconds: many batches, and this test may start the worker's Spark session."""
    connection, feed = planes
    connection.execute(COUNTS)
    for _ in range(3):
        with batch_of(feed, db, limit=40) as job:
            count_seats(job)
    assert (
        connection.execute("select kind, n, total from seats order by kind").fetchall()
        == connection.execute(
            "select 'mod ' || seats % 3, count(*), sum(seats) from plane group by 1 order by 1"
        ).fetchall()
    )


@pytest.mark.parametrize("limit", [2, 10])
def test_a_sum_does_not_depend_on_how_many_changes_a_batch_has(db, connect, path, limit):
    """Takes seconds: many batches, and this test may start the worker's Spark session."""
    connection = connect()
    connection.execute("create table fee (id bigint primary key, amount numeric(12,4))")
    connection.execute("create table fees (k int primary key, amount numeric(12,2))")
    feed = track(connection, "fee")
    connection.execute("insert into fee select n, 0.0060 from generate_series(1, 10) n")
    for _ in range(10 // limit):
        with batch_of(feed, db, limit=limit) as job:
            rows = job.rows("public.fee", key="id").groupBy(f.lit(1).alias("k"))
            with pytest.raises(MergeRefused, match=r"depend on where batches end.*cast\('decimal\(18,2\)'\)"):
                job.merge(rows.agg(f.sum("amount").alias("amount")), into="fees", key="k", mode="add")
            rounded = f.col("amount").cast("decimal(18,2)")
            job.merge(rows.agg(f.sum(rounded).alias("amount")), into="fees", key="k", mode="add")
    assert connection.execute("select amount::text from fees").fetchone() == ("0.10",)


def test_a_mirror_follows_inserts_deletes_and_keys_that_moved(db, planes, path):
    """Takes seconds: many batches, and this test may start the worker's Spark session."""
    connection, feed = planes
    connection.execute("create table mirror (id bigint primary key, tail text)")
    mirror(db, feed)
    assert (
        connection.execute("select id, tail from mirror except select id, tail from plane").fetchall() == []
    )
    connection.execute("delete from plane where id <= 10")
    connection.execute("update plane set id = id + 1000, tail = tail || '!' where id > 90")
    for id_ in [*range(1, 11), *range(91, 101), *range(1091, 1101)]:
        connection.execute(
            "insert into revision.commit_queue (commit_id, branch_id) values (%s, %s)", [id_, feed.branch]
        )
    mirror(db, feed)
    for one, other in (("mirror", "plane"), ("plane", "mirror")):
        assert (
            connection.execute(f"select id, tail from {one} except select id, tail from {other}").fetchall()
            == []
        )


def mirror(db, feed):
    with batch_of(feed, db) as job:
        rows = job.rows("public.plane", key="id", columns=["tail"])
        job.merge(rows, into="public.mirror", key="id", mode="mirror")


def test_a_mirror_of_some_rows_drops_those_that_no_longer_belong(db, planes, path):
    connection, feed = planes
    connection.execute(
        "create table mirror (id bigint primary key, tail text); insert into mirror values (100, 'old')"
    )
    with batch_of(feed, db) as job:
        rows = job.rows("public.plane", key="id", columns=["tail"]).where("id <= 5")
        job.merge(rows, into="public.mirror", key="id", mode="mirror")
    assert connection.execute("select array_agg(id order by id) from mirror").fetchone() == ([1, 2, 3, 4, 5],)


def test_results_may_lie_in_another_database_than_the_changes(db, other_db, planes, connect_to, path):
    _, feed = planes
    results = connect_to(other_db)
    results.execute(COUNTS)
    with batch_of(feed, other_db, db) as job:
        count_seats(job)
    assert results.execute("select sum(n), sum(total) from seats").fetchone() == (100, 5050)


def test_an_empty_result_is_merged_as_nothing(db, planes, path):
    connection, feed = planes
    connection.execute(COUNTS)
    with batch_of(feed, db) as job:
        rows = job.rows("public.plane", key="id").where("seats < 0").groupBy("tail").count()
        job.merge(rows.selectExpr("tail as kind", "count as n"), into="public.seats", key="kind", mode="add")
    assert connection.execute("select from seats").fetchall() == []


def test_times_are_staged_as_the_instants_that_spark_holds(db, planes, path):
    connection, feed = planes
    connection.execute("create table seen (id bigint primary key, at timestamptz, clock timestamp)")
    with batch_of(feed, db, limit=1) as job:
        frame = job.spark.sql(
            "select 1L as id, timestamp'2024-07-01 08:00:00' as at, timestamp_ntz'2024-07-01 08:00:00' as clock"
        )
        job.merge(frame, into="public.seen", key="id", mode="replace")
    assert connection.execute("select at = '2024-07-01 12:00:00+00', clock::text from seen").fetchone() == (
        True,
        "2024-07-01 08:00:00",
    )


def test_reading_and_staging_work_behind_a_pooler_in_transaction_mode(planes, pgbouncer, path):
    connection, feed = planes
    connection.execute(COUNTS)
    with batch_of(feed, pgbouncer) as job:
        count_seats(job)
    assert connection.execute("select sum(n), sum(total) from seats").fetchone() == (100, 5050)


def test_a_consumer_with_its_grants_alone_runs_a_whole_job(planes, role, path):
    connection, feed = planes
    connection.execute(COUNTS)
    consumer = role("consumer")
    connection.execute(
        f"select pubsub.grant_consumer('{consumer.name}'); "
        f"grant select on plane to {consumer.name}; grant select, insert, update on seats to {consumer.name}"
    )
    with batch_of(feed, consumer.conninfo) as job:
        count_seats(job)
    assert connection.execute("select sum(n), sum(total) from seats").fetchone() == (100, 5050)


def test_the_session_is_not_told_the_password(planes, db, executors):
    _, feed = planes
    secret = "hunter2-of-the-airline"
    with batch_of(feed, f"{db} password={secret}") as job:
        frame = job.rows("public.plane", key="id")
        plan = frame._jdf.queryExecution().toString() + frame._jdf.queryExecution().analyzed().toJSON()
        assert secret not in plan
        assert secret not in repr(job._work)
    assert not [pair for pair in spark_session().sparkContext.getConf().getAll() if secret in "".join(pair)]


def test_a_feed_without_changes_leaves_a_job_nothing_to_do(db, planes):
    _, feed = planes
    with batch_of(feed, db):
        pass
    with ConsumerTransaction(CommitFeed(feed.consumer, feed.branch), db) as consumer:
        assert consumer.claim(1) is None


@pytest.mark.parametrize(
    ("table", "key", "columns"),
    [
        ("public.nosuch", "id", None),
        ("nowhere.plane", "id", None),
        ("plane", "no", None),
        ("plane", "id", ["no"]),
        ("plane", "tail", None),
    ],
)
def test_a_table_or_column_that_is_not_there_is_named(db, planes, path, table, key, columns):
    _, feed = planes
    with batch_of(feed, db) as job, pytest.raises(Exception, match="does not exist.*: correct the table"):
        job.rows(table, key=key, columns=columns)


def test_a_small_batch_with_a_large_result_does_not_pass_through_the_driver(db, connect, planes, monkeypatch):
    connection, feed = planes
    connection.execute("create table seat (plane bigint, n int, primary key (plane, n))")
    monkeypatch.setattr("airflow_pgchange.spark.job.SMALL", 500)
    with batch_of(feed, db) as job:
        rows = job.rows("plane", key="id")
        seats = rows.select(f.col("id").alias("plane"), f.explode(f.sequence(f.lit(1), f.lit(9))).alias("n"))
        job.merge(seats, into="seat", key=["plane", "n"], mode="replace")
        assert table_sink.DRIVER not in {attempt for attempt, _ in job.staged[0].winners}
        assert sum(count for _, count in job.staged[0].winners) == 900
