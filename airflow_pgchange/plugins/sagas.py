"""Sagas: where the latest are, and the steps of one."""

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
    at: list[str] = Field(description="The steps whose turn it is to be done, or to be undone")
    reason: str | None = Field(description="Why it is undone, for who may read the connection")
    stuck: str | None = Field(description="Why it does not get on, for who may read the connection")
    is_stuck: bool
    started_at: datetime
    changed_at: datetime
    deadline: datetime | None


class Sagas(BaseModel):
    """The latest sagas of a database, those that have not ended first."""

    sagas: list[Saga]
    trouble: str | None


class Step(BaseModel):
    """A row of ``mbus.saga_steps()``."""

    step: str
    after: list[str]
    queue: str | None
    iid: str
    compensation: str | None = Field(description="The message that undoes it")
    state: str
    tries: int
    error: str | None = Field(description="What its last try failed on, for who may read the connection")
    changed_at: datetime
    retry_at: datetime | None = Field(
        description="When its message, which was put back for another try, comes again; else it is null"
    )


class Steps(BaseModel):
    """The steps of a saga. ``data``: what it was started with, if that is asked and as far as it is kept, for who may
    read the connection."""

    steps: list[Step]
    data: Content | None
    trouble: str | None


def sagas(connections: Connections) -> Sagas:
    """What a database tells of its latest sagas."""
    connection = connections[0]
    found = Sagas(sagas=[], trouble=None)
    if "mbus" in versions.present(connection):
        found.sagas = [Saga(**row) for row in records(connection, LATEST_SAGAS)]
    return found


def steps(number: int, with_data: bool, connections: Connections) -> Steps:
    """What a database tells of the steps of a saga, none where there is no such saga, and of what it was started with."""
    connection = connections[0]
    found = Steps(steps=[], data=None, trouble=None)
    if "mbus" in versions.present(connection):
        retries = dict(rows(connection, SAGA_RETRIES, [number]))
        found.steps = [
            Step(**row, retry_at=retries.get(row["step"]))
            for row in records(connection, SAGA_STEPS, [number])
        ]
    data = ask(connection, select("mbus.saga_data", number)) if with_data and found.steps else None
    found.data = None if data is None else Content.of(data)
    return found


def states_only(said: Sagas) -> Sagas:
    """For who may not read the connection: where each is."""
    shown = [one.model_copy(update={"reason": None, "stuck": None}) for one in said.sagas]
    return said.model_copy(update={"sagas": shown})


def steps_only(said: Steps) -> Steps:
    """The same of one's steps."""
    shown = [one.model_copy(update={"error": None}) for one in said.steps]
    return said.model_copy(update={"steps": shown, "data": None})


LATEST = View(sagas, Sagas(sagas=[], trouble=None), states_only)
STEPS = View(steps, Steps(steps=[], data=None, trouble=None), steps_only)
