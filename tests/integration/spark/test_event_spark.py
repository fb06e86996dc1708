"""A Spark job over a group's batch: events with payloads as JSON, or as columns of a given schema."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events import Event, publish, subscribe, topical
from airflow_pgchange.feeds import EventFeed
from tests.commits import FEED as COMMITS
from tests.commits import commits
from tests.spark_session import batch_of

FEED = EventFeed("g")


@pytest.fixture
def log(connect):
    connection = connect()
    subscribe(connection, "g", topical("delay"))
    return connection


def delays(count):
    return [
        Event("delay", {"carrier": "UA" if n % 2 else "DL", "minutes": n}, {"n": n}) for n in range(count)
    ]


def test_a_batch_has_its_payloads_as_json(db, log, path):
    ids = publish(log, [*delays(50), Event("other")], returning=True)
    with batch_of(FEED, db) as job:
        rows = sorted(job.changes().collect(), key=lambda row: row["id"])
        assert [row["id"] for row in rows] == ids[:50]
        assert {row["topic"] for row in rows} == {"delay"}
        assert json.loads(rows[7]["payload"]) == {"carrier": "UA", "minutes": 7}
        assert json.loads(rows[7]["metadata"]) == {"n": 7}
        assert len(rows[7]["subscription_ids"]) == 1


def test_a_batch_has_its_payloads_as_columns(db, log, path):
    """Takes seconds if this test starts the worker's Spark session."""
    ids = publish(log, delays(50), returning=True)
    with batch_of(FEED, db) as job:
        frame = job.payloads("carrier string, minutes int")
        assert frame.columns == ["event_id", "topic", "carrier", "minutes"]
        rows = sorted(frame.collect())
        assert rows[7] == (ids[7], "delay", "UA", 7)


def test_payloads_are_merged_into_a_table_with_the_progress(db, log, path):
    """Takes seconds if this test starts the worker's Spark session."""
    log.execute("create table carrier_delay (carrier text primary key, minutes bigint not null)")
    for start in (0, 50):
        publish(log, delays(start + 50)[start:])
        with batch_of(FEED, db) as job:
            sums = job.payloads("carrier string, minutes bigint").groupBy("carrier")
            job.merge(
                sums.agg(f.sum("minutes").alias("minutes")), into="carrier_delay", key="carrier", mode="add"
            )
    rows = log.execute("select * from carrier_delay order by 1").fetchall()
    assert rows == [("DL", sum(range(0, 100, 2))), ("UA", sum(range(1, 100, 2)))]


def test_nested_payloads_and_missing_fields_are_what_the_schema_says(db, log):
    publish(log, [Event("delay", {"at": {"code": "JFK"}, "legs": [1, 2], "more": True}), Event("delay", {})])
    schema = t.StructType(
        [
            t.StructField("at", t.StructType([t.StructField("code", t.StringType())])),
            t.StructField("legs", t.ArrayType(t.LongType()), nullable=False),
        ]
    )
    with batch_of(FEED, db) as job:
        first, second = sorted(job.payloads(schema).collect(), key=lambda row: row["event_id"])
        assert (first["at"]["code"], first["legs"]) == ("JFK", [1, 2])
        assert (second["at"], second["legs"]) == (None, None)


@pytest.mark.parametrize("payload", [{"minutes": "late"}, {"minutes": 2**40}, "a text", 7], ids=str)
def test_a_payload_that_does_not_fit_fails_with_the_events_id(db, log, path, payload):
    """Takes seconds if this test starts the worker's Spark session."""
    _, wrong = publish(log, [*delays(1), Event("delay", payload)], returning=True)
    with (
        pytest.raises(Exception, match=f"the payload of event {wrong} does not fit"),
        batch_of(FEED, db) as job,
    ):
        job.payloads("minutes int").collect()


@pytest.mark.parametrize(
    ("kind", "number"),
    [("float", 1e39), ("float", -1e200), ("double", 10**400)],
    ids=["float", "negative", "double"],
)
def test_a_number_that_a_field_cannot_hold_does_not_become_infinity(db, log, kind, number):
    [wrong] = publish(log, [Event("delay", {"minutes": number})], returning=True)
    with (
        pytest.raises(Exception, match=f"the payload of event {wrong} does not fit"),
        batch_of(FEED, db) as job,
    ):
        job.payloads(f"minutes {kind}").collect()


def test_numbers_of_a_field_that_holds_them_are_what_they_are(db, log):
    numbers = [1.5, -1e300, "Infinity", "-Infinity", None]
    publish(log, [Event("delay", {"minutes": number}) for number in numbers])
    with batch_of(FEED, db) as job:
        rows = sorted(job.payloads("minutes double").collect(), key=lambda row: row["event_id"])
        assert [row["minutes"] for row in rows] == [None if n is None else float(n) for n in numbers]


def test_a_field_that_is_called_as_a_column_of_the_frame_is_refused(db, log):
    publish(log, delays(1))
    with batch_of(FEED, db) as job, pytest.raises(InvalidArgument, match="already has a column topic"):
        job.payloads("Topic string")


def test_a_feed_without_payloads_says_so(db, connect):
    commits(connect(), 1)
    with batch_of(COMMITS, db) as job, pytest.raises(InvalidArgument, match="only events have payloads"):
        job.payloads("a int")
