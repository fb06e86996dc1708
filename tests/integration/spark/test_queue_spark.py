"""A Spark job over a queue's batch: messages as JSON, or as maps of text."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import functions as f

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import QueueFeed
from tests.commits import FEED as COMMITS
from tests.commits import commits
from tests.queues import make, post, there
from tests.spark_session import batch_of

pytestmark = pytest.mark.hstore

FEED = QueueFeed("q")


@pytest.fixture
def connection(connect):
    connection = connect()
    make(connection)
    return connection


def test_a_batch_has_its_messages_as_json_and_as_maps(db, connection, path):
    iids = [post(connection, n, kind="odd" if n % 2 else None) for n in range(50)]
    with batch_of(FEED, db) as job:
        rows = sorted(job.changes().collect(), key=lambda row: row["number"])
        assert [row["id"] for row in rows] == iids
        assert json.loads(rows[7]["data"]) == {"n": "7"}
        messages = {row["id"]: row for row in job.messages().collect()}
        assert messages[iids[7]]["data"] == {"n": "7"}
        assert messages[iids[7]]["properties"] == {"kind": "odd"}
        assert messages[iids[8]]["properties"] == {"kind": None}
        assert messages[iids[7]]["headers"]["destination"] == "q"


def test_messages_are_merged_into_a_table_as_they_are_received(db, connection, path):
    connection.execute("create table sums (kind text primary key, n bigint not null)")
    for start in (0, 50):
        for n in range(start, start + 50):
            post(connection, n, kind="odd" if n % 2 else "even")
        with batch_of(FEED, db) as job:
            sums = job.messages().groupBy(f.col("properties")["kind"].alias("kind"))
            job.merge(
                sums.agg(f.sum(f.col("data")["n"].cast("long")).alias("n")),
                into="sums",
                key="kind",
                mode="add",
            )
    rows = connection.execute("select * from sums order by 1").fetchall()
    assert rows == [("even", sum(range(0, 100, 2))), ("odd", sum(range(1, 100, 2)))]
    assert there(connection) == []


def test_a_feed_without_messages_says_so(db, connect):
    commits(connect(), 1)
    with batch_of(COMMITS, db) as job, pytest.raises(InvalidArgument, match="only queues have messages"):
        job.messages()
