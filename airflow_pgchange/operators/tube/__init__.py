"""What only tubes need: attaching, touching, backfilling, and giving up what is gone downstream."""

from airflow_pgchange.operators.tube.attach import TubeAttachOperator, TubeTouchOperator
from airflow_pgchange.operators.tube.backfill import TubeBackfillOperator
from airflow_pgchange.operators.tube.control_pods import TubeGarbageCollectOperator

__all__ = ["TubeAttachOperator", "TubeBackfillOperator", "TubeGarbageCollectOperator", "TubeTouchOperator"]
