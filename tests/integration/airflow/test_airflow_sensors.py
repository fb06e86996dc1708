"""The sensors, run as a worker runs them, on a real server, without a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowSensorTimeout, TaskDeferred

from airflow_pgchange.errors import InvalidArgument, UnknownBranch
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.sensors.consumer import ConsumerSensor
from airflow_pgchange.sensors.feed import FeedSensor

Connect = Callable[..., psycopg.Connection[Any]]
FEED = CommitFeed("delays", 0)


class Store(dict[str, Any]):
    """A store for a task's state, as Airflow passes it to the task."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value

    def delete(self, key: str) -> None:
        self.pop(key, None)


@pytest.fixture
def context() -> Any:
    return {"task_state_store": Store()}


def process(db: str, limit: int) -> None:
    with ConsumerTransaction(FEED, db) as transaction:
        if transaction.claim(limit) is not None:
            transaction.ack()


def feed_sensor(conn_id: str, **arguments: Any) -> FeedSensor:
    given = {
        "feed": FEED,
        "postgres_conn_id": conn_id,
        "deferrable": False,
        "poke_interval": 0.05,
        **arguments,
    }
    return FeedSensor(task_id="wait", **given)


def watermark_sensor(conn_id: str, **arguments: Any) -> ConsumerSensor:
    given = {
        "feed": FEED,
        "postgres_conn_id": conn_id,
        "deferrable": False,
        "poke_interval": 0.05,
        **arguments,
    }
    return ConsumerSensor(task_id="wait", **given)


def deferred(sensor: Any, context: Any) -> Any:
    """Return the trigger for which a sensor defers."""
    with pytest.raises(TaskDeferred) as caught:
        sensor.execute(context)
    return caught.value.trigger


def test_changes_that_are_ready_end_the_wait_with_the_lag(
    conn_id: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    assert feed_sensor(conn_id).execute(context)["ready"] == 3


def test_a_wait_for_changes_times_out(conn_id: str, context: Any) -> None:
    with pytest.raises(AirflowSensorTimeout):
        feed_sensor(conn_id, timeout=0).execute(context)


def test_too_few_changes_do_not_end_the_wait(
    conn_id: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    assert not feed_sensor(conn_id, min_changes=4).poke(context)


def test_a_change_that_is_old_enough_ends_the_wait(
    conn_id: str, write: Callable[[int], None], context: Any
) -> None:
    write(1)
    assert feed_sensor(conn_id, min_changes=4, max_age=0).poke(context)


def test_changes_that_somebody_works_on_do_not_end_the_wait(
    conn_id: str, db: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    with ConsumerTransaction(FEED, db):
        assert not feed_sensor(conn_id).poke(context)


def test_a_sensor_that_may_defer_hands_its_limits_to_the_trigger(conn_id: str, context: Any) -> None:
    trigger = deferred(feed_sensor(conn_id, deferrable=True, min_changes=4, max_age=60), context)
    assert (trigger.feed, trigger.min_changes, trigger.max_age, trigger.once) == (FEED, 4, 60, True)


def test_a_sensor_that_need_not_wait_does_not_defer(
    conn_id: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    assert feed_sensor(conn_id, deferrable=True).execute(context)["ready"] == 3


def test_an_error_of_the_trigger_fails_the_task(conn_id: str, context: Any) -> None:
    with pytest.raises(AirflowException, match="no branch"):
        feed_sensor(conn_id).resume(context, {"error": "there is no branch 9"})


def test_a_branch_that_does_not_exist_fails_the_task(conn_id: str, context: Any) -> None:
    with pytest.raises(UnknownBranch, match="999"):
        feed_sensor(conn_id, feed=CommitFeed("delays", 999)).execute(context)


def test_a_consumer_that_has_processed_everything_is_not_waited_for(
    conn_id: str, db: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    process(db, 10)
    assert watermark_sensor(conn_id).poke(context)


def test_a_consumer_that_has_not_begun_is_waited_for(
    conn_id: str, write: Callable[[int], None], context: Any
) -> None:
    write(1)
    assert not watermark_sensor(conn_id).poke(context)


def test_the_consumers_progress_is_asked_once_a_look(
    conn_id: str, write: Callable[[int], None], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1)
    asked: list[CommitFeed] = []
    position = CommitFeed.position

    def counted(feed: CommitFeed) -> Any:
        asked.append(feed)
        return position(feed)

    monkeypatch.setattr(CommitFeed, "position", counted)
    assert not watermark_sensor(conn_id).poke(context)
    assert len(asked) == 1


def test_the_sensor_does_not_wait_for_changes_after_its_first_run(
    conn_id: str, db: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    assert not watermark_sensor(conn_id, mode="reschedule").poke(context)
    write(3)
    process(db, 3)
    assert watermark_sensor(conn_id, mode="reschedule").poke(context)


def test_the_point_outlives_a_deferral_and_a_restart_of_the_triggerer(
    conn_id: str, db: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    first = deferred(watermark_sensor(conn_id, deferrable=True), context)
    write(3)
    again = deferred(watermark_sensor(conn_id, deferrable=True), context)
    assert first.serialize()[1]["goal"] == again.serialize()[1]["goal"]


def test_a_sensor_that_does_not_defer_waits_for_its_consumer(
    conn_id: str, db: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    with pytest.raises(AirflowSensorTimeout):
        watermark_sensor(conn_id, timeout=0.1).execute(context)
    process(db, 10)
    watermark_sensor(conn_id, timeout=30).execute(context)


def test_a_sensor_that_succeeded_forgets_its_point(
    conn_id: str, db: str, write: Callable[[int], None], context: Any
) -> None:
    write(3)
    process(db, 3)
    watermark_sensor(conn_id).execute(context)
    write(3)
    assert not watermark_sensor(conn_id).poke(context)


def test_a_wait_is_a_number_of_seconds_or_a_timedelta(conn_id: str, write: Callable[[int], None]) -> None:
    write(1)
    sensor = FeedSensor(
        task_id="wait", feed=FEED, postgres_conn_id=conn_id, min_changes=9, max_age=timedelta(0)
    )
    assert sensor.poke({}).is_done  # type: ignore[typeddict-item]


def test_waiting_for_nothing_is_refused_where_the_dag_is_written(conn_id: str) -> None:
    with pytest.raises(InvalidArgument, match="min_changes"):
        FeedSensor(task_id="wait", feed=FEED, postgres_conn_id=conn_id, min_changes=0)
