"""Tubes beside their feed: making them, backfills, control pods and workers. psycopg only, no Airflow and no Spark."""

from airflow_pgchange.tubes.attaching import attach, attached, ensure, touch
from airflow_pgchange.tubes.backfilling import Progress, backfill, backfill_in_steps, chunks
from airflow_pgchange.tubes.control import Control, Downstream
from airflow_pgchange.tubes.copies import TableDownstream
from airflow_pgchange.tubes.workers import WorkerStatus, ready, status, worker
from airflow_pgchange.tubes.working_off import WorkedOff, work_off

__all__ = [
    "Control",
    "Downstream",
    "Progress",
    "TableDownstream",
    "WorkedOff",
    "WorkerStatus",
    "attach",
    "attached",
    "backfill",
    "backfill_in_steps",
    "chunks",
    "ensure",
    "ready",
    "status",
    "touch",
    "work_off",
    "worker",
]
