"""Backfills of tubes: the view of a database's backfills, and the actions on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import psycopg
from fastapi import APIRouter
from pydantic import BaseModel

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds.queries import ask, records, select
from airflow_pgchange.plugins import datamodels
from airflow_pgchange.plugins.access import acting
from airflow_pgchange.plugins.actions import both
from airflow_pgchange.plugins.datamodels import Done
from airflow_pgchange.plugins.request_fields import Name, Number
from airflow_pgchange.plugins.views import View
from airflow_pgchange.tubes import backfills as tubes

SHOWN = 100
"""Maximum number of backfills shown: first the running backfills, then the latest."""
BACKFILLS = """
select b.id, b.tube, b.tbl::text as "table", b.order_col::text as "order", b.state, b.looked_at, b.total,
       b.percent::float8, b.touched, b.rate, extract(epoch from b.remaining)::float8 as remaining_seconds, b.message,
       b.started_by::text, b.started_at, b.updated_at, b.finished_at
from tube.backfills() as b limit %s
"""
TABLES = 'select a.tube, a.tbl::text as "table" from tube.attachments() as a order by a.tube, a.tbl::text'

router = APIRouter(tags=["actions"])


class BackfillStart(BaseModel):
    """The table to backfill, and the tube."""

    tube: Name
    table: Name


def backfills(connections: Sequence[psycopg.Connection[Any]]) -> datamodels.Backfills:
    """Return the latest backfills of a database, and the tables that are attached to its tubes."""
    connection = connections[0]
    answer = datamodels.Backfills(backfills=[], tables=[], failure=None)
    if "tube" in versions.present(connection):
        answer.backfills = [datamodels.Backfill(**row) for row in records(connection, BACKFILLS, [SHOWN])]
        answer.tables = [datamodels.Table(**row) for row in records(connection, TABLES)]
    return answer


def state_only(answer: datamodels.Backfills) -> datamodels.Backfills:
    """Return the progress of backfills without messages and tables, for users who may not read the connection."""
    shown = [backfill.model_copy(update={"message": None}) for backfill in answer.backfills]
    return answer.model_copy(update={"backfills": shown, "tables": []})


VIEW = View(backfills, datamodels.Backfills(backfills=[], tables=[], failure=None), state_only)


@router.post(
    "/connections/{connection_id:path}/backfills/start",
    dependencies=acting("pgchange_backfill_start", BackfillStart),
)
def start(connection_id: str, payload: BackfillStart) -> Done:
    """Ask the workers of a tube to backfill a table. An unfinished backfill of the table continues where it stopped."""
    with both(connection_id, None) as (connection, _):
        number = tubes.ask_backfill(connection, payload.tube, payload.table)
    return Done(
        done=[
            f"backfill {number} of {payload.table} continues with the next run of the workers of {payload.tube}"
        ]
    )


@router.post(
    "/connections/{connection_id:path}/backfills/{number}/pause",
    dependencies=acting("pgchange_backfill_pause"),
)
def pause(connection_id: str, number: Number) -> Done:
    """Pause a backfill after its current chunk."""
    return _change_state(connection_id, number, "pause", "paused")


@router.post(
    "/connections/{connection_id:path}/backfills/{number}/resume",
    dependencies=acting("pgchange_backfill_resume"),
)
def resume(connection_id: str, number: Number) -> Done:
    """Let a paused backfill go on where it stopped."""
    return _change_state(connection_id, number, "resume", "no longer paused")


@router.post(
    "/connections/{connection_id:path}/backfills/{number}/cancel",
    dependencies=acting("pgchange_backfill_cancel"),
)
def cancel(connection_id: str, number: Number) -> Done:
    """Cancel a backfill. Rows that it has touched are still processed, and nothing is undone downstream."""
    return _change_state(connection_id, number, "cancel", "cancelled")


def _change_state(
    connection_id: str, number: Number, verb: Literal["pause", "resume", "cancel"], state: str
) -> Done:
    with both(connection_id, None) as (connection, _):
        ask(connection, select(f"tube.backfill_{verb}", number))
    return Done(done=[f"backfill {number} is {state}"])
