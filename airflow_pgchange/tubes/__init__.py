"""Functions for tubes besides their feed: create them, backfill tables, process control pods. Needs psycopg only."""

from airflow_pgchange.tubes.attachment import attach, attached, ensure, key_types, touch
from airflow_pgchange.tubes.backfills import BackfillProgress, ask_backfill, backfill, backfill_chunks
from airflow_pgchange.tubes.control_pods import Control, Downstream, work_off
from airflow_pgchange.tubes.copies import TableDownstream
from airflow_pgchange.tubes.reports import recompute
from airflow_pgchange.tubes.worker_feeds import ready, workers

__all__ = [
    "BackfillProgress",
    "Control",
    "Downstream",
    "TableDownstream",
    "ask_backfill",
    "attach",
    "attached",
    "backfill",
    "backfill_chunks",
    "ensure",
    "key_types",
    "ready",
    "recompute",
    "touch",
    "work_off",
    "workers",
]
