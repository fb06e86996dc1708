"""The DAGs of the test with a whole Airflow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk import Asset, dag, task
from psycopg import Connection

from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.assets.targets import target_tables
from airflow_pgchange.feeds import Batch, Change, CommitFeed
from airflow_pgchange.feeds.feed_kinds import to_json
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.sensors.consumer import ConsumerSensor
from airflow_pgchange.sensors.feed import FeedSensor

NOTED = CommitFeed("noted", 0)
SLOW = CommitFeed("slow", 0)
BY_HAND = CommitFeed("by_hand", 0)
AIRLINE = "airline"
NOTES = os.environ["AIRFLOW__PGCHANGE_TESTS__NOTES"]
"""The URI of the asset for the written table."""
JOB, RESULTS = (os.environ[f"AIRFLOW__PGCHANGE_TESTS__{name}"] for name in ("JOB", "RESULTS"))
"""The application of a detached batch, and its database."""


def note(batch: Batch, changes: Iterator[Change], connection: Connection[Any]) -> None:
    with connection.cursor() as cursor:
        cursor.executemany(
            "insert into noted values (%s, %s)", [(change.id, batch.feed) for change in changes]
        )


@dag(schedule=[feed_asset(NOTED, AIRLINE)], max_active_runs=1, is_paused_upon_creation=False)
def noted() -> None:
    task.pgchange_batch(feed=NOTED, postgres_conn_id=AIRLINE, limit=4, outlets=[target_tables("notes")])(
        note
    )()


@dag(schedule=[Asset(NOTES)], is_paused_upon_creation=False)
def after_notes() -> None:
    @task
    def read(triggering_asset_events: Any = None) -> int:
        return sum(event.extra["changes"] for event in triggering_asset_events[Asset(NOTES)])

    read()


@dag(schedule=[feed_asset(SLOW, AIRLINE)], max_active_runs=1, is_paused_upon_creation=False)
def slow() -> None:
    @task.pgchange_batch(feed=SLOW, postgres_conn_id=AIRLINE)
    def work(batch: Batch, changes: Iterator[Change], connection: Connection[Any]) -> None:
        while connection.execute("select count(*) from go").fetchone() == (0,):
            time.sleep(0.2)
        note(batch, changes, connection)

    work()


# If a sensor is queued again, Airflow 3.3 may treat it as a lost task and fail it (its issues 71172 and 72716).
AGAIN = {"retries": 5, "retry_delay": timedelta(seconds=1)}


@dag(schedule=None, default_args=AGAIN)
def waits() -> None:
    FeedSensor(
        task_id="for_changes", feed=BY_HAND, postgres_conn_id=AIRLINE, deferrable=True
    ) >> ConsumerSensor(task_id="for_the_consumer", feed=BY_HAND, postgres_conn_id=AIRLINE, deferrable=True)


@dag(schedule=None, default_args=AGAIN)
def waits_for_changes() -> None:
    FeedSensor(
        task_id="for_changes", feed=CommitFeed("patient", 0), postgres_conn_id=AIRLINE, deferrable=True
    )


@dag(schedule=None, default_args=AGAIN)
def waits_by_reschedule() -> None:
    ConsumerSensor(
        task_id="for_the_consumer",
        feed=BY_HAND,
        postgres_conn_id=AIRLINE,
        deferrable=False,
        mode="reschedule",
        poke_interval=2,
    )


@dag(schedule=None)
def mapped() -> None:
    BatchOperator.partial(task_id="each", process=note, postgres_conn_id=AIRLINE).expand(
        feed=[to_json(CommitFeed("left", 0)), to_json(CommitFeed("right", 0))]
    )


@dag(schedule=None)
def elsewhere() -> None:
    SparkBatchOperator(
        task_id="driver",
        detached=True,
        lease="1 min",
        feed=CommitFeed("elsewhere", 0),
        postgres_conn_id=AIRLINE,
        application=JOB,
        env_vars={"PGCHANGE_RESULTS": RESULTS},
    )


noted()
after_notes()
slow()
waits()
waits_for_changes()
waits_by_reschedule()
mapped()
elsewhere()
