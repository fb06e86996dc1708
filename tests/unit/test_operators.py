"""What Airflow does with every operator, whatever it is for."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator

from airflow_pgchange import decorators, operators, sensors
from airflow_pgchange.arguments import seconds, until_of
from airflow_pgchange.decorators.batch import BatchDecoratedOperator
from airflow_pgchange.events import Handler
from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.draining import DrainingOperator
from airflow_pgchange.operators.events import (
    PollEventsOperator,
    PublishEventsOperator,
    ReplayEventsOperator,
    SubscribeOperator,
)
from airflow_pgchange.operators.handlers import EventHandlersOperator
from airflow_pgchange.operators.letters import DeadLettersOperator
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.operators.queues import ClearQueuesOperator, PostMessageOperator, RequestOperator
from airflow_pgchange.operators.sagas import SagaHandlerOperator, StartSagaOperator
from airflow_pgchange.operators.schema import InstallSchemaOperator
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.operators.tube import (
    TubeAttachOperator,
    TubeBackfillOperator,
    TubeGarbageCollectOperator,
    TubeTouchOperator,
)
from airflow_pgchange.sagas import Saga, Step
from airflow_pgchange.sensors.pgchange import FeedSensor, WatermarkSensor
from airflow_pgchange.sensors.sagas import SagaSensor
from airflow_pgchange.sensors.topology import TopologySensor
from airflow_pgchange.stopping import Stop


def nothing(*_: Any) -> None:
    """A callable that a task is given."""


COMMITS, TUBE = CommitFeed("audit", 0), TubeFeed("q")
ARGUMENTS: dict[Callable[..., BaseOperator], dict[str, Any]] = {
    BatchOperator: {"feed": COMMITS, "process": nothing},
    BatchDecoratedOperator: {"feed": COMMITS, "python_callable": nothing},
    ClearQueuesOperator: {},
    DeadLettersOperator: {"action": "drop"},
    DrainingOperator: {"feed": COMMITS},
    EventHandlersOperator: {"group": "g", "handlers": [Handler("h", nothing)]},
    FeedSensor: {"feed": COMMITS},
    InstallSchemaOperator: {},
    MaintenanceOperator: {},
    PollEventsOperator: {},
    PostMessageOperator: {"queue": "q", "data": {}},
    PublishEventsOperator: {"events": []},
    ReplayEventsOperator: {"group": "g", "since": "2026-01-31T12:00:00+00:00"},
    RequestOperator: {"queue": "q", "data": {}},
    SagaHandlerOperator: {"queue": "q", "do": nothing},
    SagaSensor: {"saga": 1},
    SparkBatchOperator: {"feed": COMMITS, "application": "job.py"},
    StartSagaOperator: {"saga": Saga("tour", (Step("hotel", "hotels", lasting=True),)), "data": {}},
    SubscribeOperator: {"group": "g", "topics": "a"},
    TopologySensor: {"condition": "every replicaset has a master"},
    TubeAttachOperator: {"tube": "q", "tables": "plane"},
    TubeBackfillOperator: {"tube": "q", "tables": "plane"},
    TubeGarbageCollectOperator: {"feed": TUBE, "downstream": nothing},
    TubeTouchOperator: {"tube": "q", "query": "select 1", "shard": 0},
    WatermarkSensor: {"feed": COMMITS},
}


def ours() -> Iterator[type[BaseOperator]]:
    for folder in (operators, sensors, decorators):
        for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            for each in vars(import_module(module.name)).values():
                if (
                    isinstance(each, type)
                    and issubclass(each, BaseOperator)
                    and each.__module__ == module.name
                ):
                    yield each


def test_every_operator_is_looked_at() -> None:
    assert set(ours()) == set(ARGUMENTS)


@pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)
def test_a_part_of_a_dag_can_be_taken_whatever_operators_it_has(kind: Any) -> None:
    with DAG("whole") as whole:
        kind(task_id="task", **ARGUMENTS[kind])
    assert whole.partial_subset("task").task_ids == ["task"]


DURATIONS = [
    (BatchOperator, "wait_for"),
    (SparkBatchOperator, "wait_for"),
    (SagaHandlerOperator, "wait_for"),
    (EventHandlersOperator, "wait_for"),
    (ReplayEventsOperator, "wait_for"),
    (PollEventsOperator, "within"),
    (PollEventsOperator, "poll_every"),
    (TubeBackfillOperator, "timeout"),
    (TubeGarbageCollectOperator, "wait_for"),
    (TubeGarbageCollectOperator, "backfill_for"),
    (RequestOperator, "poll_interval"),
]


@pytest.mark.parametrize(("kind", "name"), DURATIONS, ids=lambda one: getattr(one, "__name__", one))
def test_a_duration_is_seconds_their_text_or_a_timedelta(kind: Any, name: str) -> None:
    for given in (60, "60", timedelta(minutes=1)):
        assert getattr(kind(task_id="task", **ARGUMENTS[kind], **{name: given}), name) == 60
    for wrong in ("soon", -1, float("nan"), timedelta(minutes=-1), []):
        with pytest.raises(InvalidArgument, match=name):
            kind(task_id="task", **ARGUMENTS[kind], **{name: wrong})


@pytest.mark.parametrize("given", [60, "60", timedelta(minutes=1)])
def test_a_task_may_work_until_any_duration_is_over(given: Any) -> None:
    assert until_of(given) == seconds("pause", given) == 60


def test_a_copy_of_what_was_asked_to_stop_is_not_asked() -> None:
    stop = Stop()
    copied = copy.deepcopy(stop)
    stop.ask()
    assert (stop(), copied()) == (True, False)


def test_a_batch_is_of_the_same_size_by_an_operator_and_by_the_library():
    assert BatchOperator(task_id="t", **ARGUMENTS[BatchOperator]).limit == Plan(COMMITS, "").limit == 100_000
