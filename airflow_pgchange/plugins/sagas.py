"""The views of sagas: the latest sagas of a database, and the steps of a saga."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import psycopg
from pydantic import BaseModel, Field

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds.queries import ask, records, rows, select
from airflow_pgchange.plugins.datamodels import Content
from airflow_pgchange.plugins.views import View

LATEST_SAGAS = "select s.*, s.stuck is not null as is_stuck from mbus.latest_sagas() as s"
SAGA_STEPS = "select s.qname as queue, s.* from mbus.saga_steps(%s) as s"
SAGA_RETRIES = "select step, due_at from mbus.saga_retries(%s)"

Connections = Sequence[psycopg.Connection[Any]]


class Saga(BaseModel):
    """A row of ``mbus.latest_sagas()``."""

    id: int
    name: str
    state: str
    steps: int
    done: int
    undone: int
    at: list[str] = Field(description="The steps that are to be done or compensated next")
    reason: str | None = Field(description="Reason of the rollback, for readers of the connection")
    stuck: str | None = Field(
        description="Reason why the saga makes no progress, for readers of the connection"
    )
    is_stuck: bool
    started_at: datetime
    changed_at: datetime
    deadline: datetime | None


class Sagas(BaseModel):
    """The latest sagas of a database. Sagas that have not ended come first."""

    sagas: list[Saga]
    failure: str | None


class Step(BaseModel):
    """A row of ``mbus.saga_steps()``."""

    step: str
    after: list[str]
    queue: str | None
    iid: str
    compensation: str | None = Field(description="The message that compensates the step")
    state: str
    tries: int
    error: str | None = Field(description="Error of its last try, for readers of the connection")
    changed_at: datetime
    retry_at: datetime | None = Field(
        description="Time of the next try, if the step's message was put back for a retry"
    )


class Steps(BaseModel):
    """The steps of a saga. ``data``: the data with which it was started, if requested and still kept; visible to users
    who may read the connection."""

    steps: list[Step]
    data: Content | None
    failure: str | None


def sagas(connections: Connections) -> Sagas:
    """Return the latest sagas of a database."""
    connection = connections[0]
    answer = Sagas(sagas=[], failure=None)
    if "mbus" in versions.present(connection):
        answer.sagas = [Saga(**row) for row in records(connection, LATEST_SAGAS)]
    return answer


def steps(number: int, with_data: bool, connections: Connections) -> Steps:
    """Return the steps of a saga and the data with which it was started. There are no steps if there is no such saga."""
    connection = connections[0]
    answer = Steps(steps=[], data=None, failure=None)
    if "mbus" in versions.present(connection):
        retries = dict(rows(connection, SAGA_RETRIES, [number]))
        answer.steps = [
            Step(**row, retry_at=retries.get(row["step"]))
            for row in records(connection, SAGA_STEPS, [number])
        ]
    data = ask(connection, select("mbus.saga_data", number)) if with_data and answer.steps else None
    answer.data = None if data is None else Content.of(data)
    return answer


def states_only(answer: Sagas) -> Sagas:
    """Return the states of sagas without reasons, for users who may not read the connection."""
    shown = [saga.model_copy(update={"reason": None, "stuck": None}) for saga in answer.sagas]
    return answer.model_copy(update={"sagas": shown})


def steps_only(answer: Steps) -> Steps:
    """Return the states of steps without errors and data, for users who may not read the connection."""
    shown = [step.model_copy(update={"error": None}) for step in answer.steps]
    return answer.model_copy(update={"steps": shown, "data": None})


LATEST = View(sagas, Sagas(sagas=[], failure=None), states_only)
STEPS = View(steps, Steps(steps=[], data=None, failure=None), steps_only)
