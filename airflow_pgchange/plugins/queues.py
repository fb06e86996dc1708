"""Message queues: what a database tells of each, a row for each of its consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from pydantic import BaseModel, Field

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds.queries import records
from airflow_pgchange.plugins.views import View

QUEUES = "select q.qname as queue, q.* from mbus.queues() as q"


class Queue(BaseModel):
    """A row of ``mbus.queues()``: the messages that a consumer of a queue is still to receive."""

    queue: str
    consumer: str
    parts: int
    selector: str | None = Field(description="Which messages it gets, for who may read the connection")
    ready: int | None
    delayed: int | None
    waiting: int | None = Field(description="For another message, which comes before")
    in_work: int = Field(description="In batches that somebody is at work on")
    exact: bool | None = Field(description="Whether these are so many, or at least so many")
    oldest_seconds: float | None
    dead: int = Field(description="Messages of the queue among the dead letters, of all its consumers")
    dead_exact: bool
    trouble: str | None = Field(description="Why that cannot be told, for who may read the connection")


class Queues(BaseModel):
    """The queues of a database."""

    queues: list[Queue]
    trouble: str | None


def queues(connections: Sequence[psycopg.Connection[Any]]) -> Queues:
    """What a database tells of its queues."""
    connection = connections[0]
    found = Queues(queues=[], trouble=None)
    if "mbus" in versions.present(connection):
        found.queues = [Queue(**row) for row in records(connection, QUEUES)]
    return found


def counts_only(said: Queues) -> Queues:
    """For who may not read the connection: how many there are."""
    shown = [one.model_copy(update={"selector": None, "trouble": None}) for one in said.queues]
    return said.model_copy(update={"queues": shown})


VIEW = View(queues, Queues(queues=[], trouble=None), counts_only)
