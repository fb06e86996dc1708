"""Tubes beside their feed: making them, backfills, control pods and workers. psycopg only, no Airflow and no Spark."""

from airflow_pgchange.tubes.attachment import attach, attached, ensure, touch
from airflow_pgchange.tubes.backfills import Progress, backfill, backfill_in_steps, chunks
from airflow_pgchange.tubes.control_pods import Control, Downstream, WorkedOff, work_off
from airflow_pgchange.tubes.copies import TableDownstream
from airflow_pgchange.tubes.workers import ready, worker

__all__ = [
    "Control",
    "Downstream",
    "Progress",
    "TableDownstream",
    "WorkedOff",
    "attach",
    "attached",
    "backfill",
    "backfill_in_steps",
    "chunks",
    "ensure",
    "ready",
    "touch",
    "work_off",
    "worker",
]
