"""Every operator, sensor and decorator of this package, with a value for every argument of its own."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

from airflow.sdk import BaseOperator

from airflow_pgchange import decorators, operators, sensors
from airflow_pgchange.decorators.batch import BatchDecoratedOperator
from airflow_pgchange.decorators.handlers import HandlerDecoratedOperator
from airflow_pgchange.decorators.sagas import SagaDecoratedOperator
from airflow_pgchange.decorators.spark import SparkDecoratedOperator
from airflow_pgchange.decorators.tube import CollectDecoratedOperator
from airflow_pgchange.events import Handler
from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.messages import Saga, Step
from airflow_pgchange.operators import (
    TubeAttachOperator,
    TubeBackfillOperator,
    TubeGarbageCollectOperator,
    TubeRecomputeOperator,
    TubeTouchOperator,
)
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.claim import ClaimingOperator, ConsumerOperator
from airflow_pgchange.operators.dead_letters import DeadLettersOperator
from airflow_pgchange.operators.detached import (
    AckBatchOperator,
    ClaimBatchOperator,
    ReleaseBatchOperator,
)
from airflow_pgchange.operators.events import (
    PublishEventsOperator,
    ReplayEventsOperator,
    SubscribeEventsOperator,
)
from airflow_pgchange.operators.feed import FeedOperator
from airflow_pgchange.operators.handlers import EventHandlersOperator
from airflow_pgchange.operators.lake_maintenance import LakeMaintenanceOperator
from airflow_pgchange.operators.lease import LeasingOperator
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.operators.messages import PostMessageOperator, RequestMessageOperator
from airflow_pgchange.operators.sagas import SagaHandlerOperator, StartSagaOperator
from airflow_pgchange.operators.schema import InstallSchemaOperator
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.operators.spark_detached import DetachedSpark
from airflow_pgchange.sensors.consumer import ConsumerSensor
from airflow_pgchange.sensors.feed import FeedSensor
from airflow_pgchange.sensors.sagas import SagaSensor


def nothing(*_: Any) -> None:
    """Do nothing. Operators get this function where they need any callable."""


def of_a_job(job: object) -> None:
    """Do nothing with a job. The Spark decorators wrap this function."""


COMMITS, TUBE = CommitFeed("audit", 0), TubeFeed("q")
WHERE = {"postgres_conn_id": "shop"}
BOTH = {**WHERE, "source_conn_id": "history"}
CONSUMER = {"feed": COMMITS, **BOTH}
CLAIM = {
    **CONSUMER,
    "limit": 10,
    "on_busy": "wait",
    "busy_timeout": "1 min",
    "max_attempts": 3,
    "on_give_up": "dead_letter",
}
LEASE = {"lease": "30 min", "deferrable": True}
FEED = {
    **CLAIM,
    "max_batches": 2,
    "until": "1 min",
    "idle_timeout": "1 s",
    "skip_if_empty": True,
}
SENSOR = {"poke_interval": 2.0, "poll_interval": 0.5, "deferrable": True}
MESSAGE = {
    "queue_name": "q",
    "data": {"n": "1"},
    "properties": {"kind": None},
    "after": ["q.1"],
    "delay": timedelta(seconds=5),
    "expiry": "1 day",
    **WHERE,
}
SPARK = {
    "name": "n",
    "catalogue_conn_id": "catalogue",
    "instances_conn_id": "instances",
    "fast_start": True,
    "detached": False,
    **LEASE,
}
FUNCTION = {"python_callable": nothing, "op_args": None, "op_kwargs": {}}
HANDLERS = {
    "group": "g",
    "until": 60,
    "idle_timeout": 5,
    "limit": 10,
    "read_ahead": 2,
    "on_busy": "skip",
    "busy_timeout": 1,
    "skip_if_empty": True,
    **WHERE,
}
SAGA_HANDLER = {
    **{
        name: FEED[name]
        for name in ("postgres_conn_id", "max_batches", "until", "idle_timeout", "on_busy", "busy_timeout")
    },
    "skip_if_empty": True,
    "queue_name": "q",
    "consumer": "c",
    "max_attempts": 3,
}
COLLECT = {
    "feed": TUBE,
    "key": "no",
    "backfill_timeout": 5,
    "busy_timeout": 5,
    "skip_if_empty": True,
    **BOTH,
}
SAGA = Saga("tour", (Step("hotel", "hotels", lasting=True),))
ARGUMENTS: dict[Callable[..., BaseOperator], dict[str, Any]] = {
    AckBatchOperator: {**CONSUMER, "handle": "eyJmZWVkIjp9", "staged": True, "write": nothing},
    BatchOperator: {**FEED, "process": nothing},
    BatchDecoratedOperator: {**FEED, **FUNCTION},
    ClaimBatchOperator: {**CLAIM, **LEASE},
    ClaimingOperator: CLAIM,
    CollectDecoratedOperator: {**COLLECT, **FUNCTION},
    ConsumerOperator: CONSUMER,
    DeadLettersOperator: {
        "action": "drop",
        "consumer": "commits:audit/0",
        "older_than": "7 days",
        "letter_ids": [1],
        "key": "4711",
        "field": "customer.mail",
        **BOTH,
    },
    DetachedSpark: {**FEED, **LEASE},
    FeedOperator: FEED,
    EventHandlersOperator: {**HANDLERS, "handlers": [Handler("h", nothing)]},
    FeedSensor: {"feed": COMMITS, **BOTH, "min_changes": 5, "max_age": 60, **SENSOR},
    InstallSchemaOperator: {"systems": ["tube"], "without": ["topology"], **WHERE},
    LeasingOperator: {**CLAIM, **LEASE},
    LakeMaintenanceOperator: {
        "table": "lake.sales.payment",
        "older_than": "7 days",
        "snapshot_retention": timedelta(days=30),
        "dry_run": True,
        **WHERE,
    },
    MaintenanceOperator: {
        "width": 1000,
        "ahead": 3,
        "retention": "30 days",
        "retention_bytes": "10 GB",
        "retention_count": 1_000_000,
        "saga_retention": timedelta(days=7),
        "letter_retention": timedelta(days=90),
        **WHERE,
    },
    PostMessageOperator: MESSAGE,
    PublishEventsOperator: {"events": [{"topic": "t"}], **WHERE},
    ReleaseBatchOperator: {**CONSUMER, "handle": "eyJmZWVkIjp9"},
    ReplayEventsOperator: {
        "group": "g",
        "since": "2026-01-31T12:00:00+00:00",
        "subscription_id": "s",
        "limit": 10,
        "busy_timeout": 5,
        **WHERE,
    },
    RequestMessageOperator: {
        **MESSAGE,
        "reply_queue": "answers",
        "timeout": "10 min",
        "poll_interval": 1,
        "deferrable": True,
    },
    HandlerDecoratedOperator: {**HANDLERS, **FUNCTION, "handler": {"name": "h", "reliable": False}},
    SagaDecoratedOperator: {**SAGA_HANDLER, **FUNCTION},
    SagaHandlerOperator: {**SAGA_HANDLER, "do": nothing},
    SagaSensor: {"saga": 1, "mode": "poke", "poke_interval": 2.0, **WHERE},
    SparkBatchOperator: {**FEED, **SPARK, "application": "job.py"},
    SparkDecoratedOperator: {
        **FEED,
        **SPARK,
        "python_callable": of_a_job,
        "op_args": None,
        "op_kwargs": {},
    },
    StartSagaOperator: {"saga": SAGA, "data": {"n": "1"}, **WHERE},
    SubscribeEventsOperator: {
        "group": "g",
        "topics": ["a"],
        "partition": (0, 2),
        "by": "n",
        "expiry": "1 hour",
        **WHERE,
    },
    TubeAttachOperator: {
        "tube": "q",
        "tables": ["plane"],
        "shard": 1,
        "key": "no",
        "group_by": "no",
        "workers": 2,
        "predicate": "true",
        **WHERE,
    },
    TubeBackfillOperator: {
        "tube": "q",
        "tables": ["plane"],
        "order_col": "no",
        "shard": 1,
        "chunk_size": 10,
        "pause": 1,
        "timeout": 5,
        **WHERE,
    },
    TubeGarbageCollectOperator: {**COLLECT, "downstream": nothing},
    TubeRecomputeOperator: {
        **FEED,
        "feed": TUBE,
        "query": "select id from plane where id = any(%(ids)s)",
        "into": "report",
        "key": "id",
        "evolve": True,
    },
    TubeTouchOperator: {"tube": ["q"], "query": "select 1", "shard": 0, "op": "B", **WHERE},
    ConsumerSensor: {"feed": COMMITS, **BOTH, **SENSOR},
}
"""By class: a value for every argument that the class itself defines."""


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


def own_arguments(kind: type) -> dict[str, str]:
    """Return the arguments that this package's constructors of a class define, with their types."""
    found: dict[str, str] = {}
    fixed: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.startswith("airflow_pgchange.") and "__init__" in vars(each):
            for name, one in inspect.signature(vars(each)["__init__"]).parameters.items():
                if one.kind is one.KEYWORD_ONLY and name not in fixed:
                    found.setdefault(name, str(one.annotation))
            fixed |= FIXED.get(each, set())
    return found


FIXED: dict[type, set[str]] = {
    SagaHandlerOperator: {"feed", "limit", "on_give_up", "source_conn_id"},
    BatchDecoratedOperator: {"process"},
    CollectDecoratedOperator: {"downstream"},
    HandlerDecoratedOperator: {"handlers"},
    SagaDecoratedOperator: {"feed", "limit", "on_give_up", "source_conn_id", "do"},
}
"""Arguments that a subclass sets itself, so that a user cannot."""
