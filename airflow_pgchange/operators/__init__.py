"""Operators that process batches, events and messages, and that maintain the schemas."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.operators.batch import BatchOperator
    from airflow_pgchange.operators.dead_letters import DeadLettersOperator
    from airflow_pgchange.operators.detached import (
        AckBatchOperator,
        ClaimBatchOperator,
        ClaimedBatch,
        ReleaseBatchOperator,
        claimed_batch,
    )
    from airflow_pgchange.operators.events import (
        PublishEventsOperator,
        ReplayEventsOperator,
        SubscribeEventsOperator,
    )
    from airflow_pgchange.operators.handlers import EventHandlersOperator
    from airflow_pgchange.operators.lake_maintenance import LakeMaintenanceOperator
    from airflow_pgchange.operators.maintenance import MaintenanceOperator
    from airflow_pgchange.operators.messages import PostMessageOperator, RequestMessageOperator
    from airflow_pgchange.operators.sagas import SagaHandlerOperator, StartSagaOperator
    from airflow_pgchange.operators.schema import InstallSchemaOperator
    from airflow_pgchange.operators.spark import SparkBatchOperator
    from airflow_pgchange.operators.tube.attach import TubeAttachOperator, TubeTouchOperator
    from airflow_pgchange.operators.tube.backfill import TubeBackfillOperator
    from airflow_pgchange.operators.tube.control_pods import TubeGarbageCollectOperator
    from airflow_pgchange.operators.tube.recompute import TubeRecomputeOperator
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "batch": ["BatchOperator"],
            "detached": [
                "AckBatchOperator",
                "ClaimBatchOperator",
                "ClaimedBatch",
                "ReleaseBatchOperator",
                "claimed_batch",
            ],
            "events": ["PublishEventsOperator", "ReplayEventsOperator", "SubscribeEventsOperator"],
            "handlers": ["EventHandlersOperator"],
            "lake_maintenance": ["LakeMaintenanceOperator"],
            "dead_letters": ["DeadLettersOperator"],
            "maintenance": ["MaintenanceOperator"],
            "messages": ["PostMessageOperator", "RequestMessageOperator"],
            "sagas": ["SagaHandlerOperator", "StartSagaOperator"],
            "schema": ["InstallSchemaOperator"],
            "spark": ["SparkBatchOperator"],
            "tube.attach": ["TubeAttachOperator", "TubeTouchOperator"],
            "tube.backfill": ["TubeBackfillOperator"],
            "tube.control_pods": ["TubeGarbageCollectOperator"],
            "tube.recompute": ["TubeRecomputeOperator"],
        },
    )

__all__ = [
    "AckBatchOperator",
    "BatchOperator",
    "ClaimBatchOperator",
    "ClaimedBatch",
    "DeadLettersOperator",
    "EventHandlersOperator",
    "InstallSchemaOperator",
    "LakeMaintenanceOperator",
    "MaintenanceOperator",
    "PostMessageOperator",
    "PublishEventsOperator",
    "ReleaseBatchOperator",
    "ReplayEventsOperator",
    "RequestMessageOperator",
    "SagaHandlerOperator",
    "SparkBatchOperator",
    "StartSagaOperator",
    "SubscribeEventsOperator",
    "TubeAttachOperator",
    "TubeBackfillOperator",
    "TubeGarbageCollectOperator",
    "TubeRecomputeOperator",
    "TubeTouchOperator",
    "claimed_batch",
]
