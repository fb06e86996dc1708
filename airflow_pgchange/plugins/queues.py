"""The view of message queues: a row for each consumer of each queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from pydantic import BaseModel, Field

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds.queries import records
from airflow_pgchange.plugins.views import View

QUEUES = "select q.qname as queue, q.trouble as failure, q.* from mbus.queues() as q"


class Queue(BaseModel):
    """A row of ``mbus.queues()``: the messages that a consumer of a queue has not received yet."""

    queue: str
    consumer: str
    parts: int
    selector: str | None = Field(
        description="Condition that selects its messages, for readers of the connection"
    )
    ready: int | None
    delayed: int | None
    waiting: int | None = Field(description="Messages that wait for an earlier message")
    in_work: int = Field(description="Messages in claimed batches")
    exact: bool | None = Field(description="Whether the counts are exact; otherwise they are minima")
    oldest_seconds: float | None
    dead: int = Field(description="Dead letters of the queue, of all its consumers")
    dead_exact: bool
    failure: str | None = Field(
        description="Reason why the counts are unknown, for readers of the connection"
    )


class Queues(BaseModel):
    """The queues of a database."""

    queues: list[Queue]
    failure: str | None


def queues(connections: Sequence[psycopg.Connection[Any]]) -> Queues:
    """Return the message queues of a database."""
    connection = connections[0]
    answer = Queues(queues=[], failure=None)
    if "mbus" in versions.present(connection):
        answer.queues = [Queue(**row) for row in records(connection, QUEUES)]
    return answer


def counts_only(answer: Queues) -> Queues:
    """Return the counts only, for users who may not read the connection."""
    shown = [queue.model_copy(update={"selector": None, "failure": None}) for queue in answer.queues]
    return answer.model_copy(update={"queues": shown})


VIEW = View(queues, Queues(queues=[], failure=None), counts_only)
