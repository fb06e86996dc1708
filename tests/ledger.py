"""A tracked ledger for the tests of operators and sensors, and an audit of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from airflow_pgchange.feeds import Batch, Change, CommitFeed
from airflow_pgchange.operators.batch import BatchOperator

FEED = CommitFeed("audit", 0)

Connect = Callable[..., psycopg.Connection[Any]]


def make_ledger(connection: psycopg.Connection[Any]) -> None:
    """A ledger whose rows are commits of the trunk, and a table for its audit."""
    connection.execute(
        "create table ledger (id bigint generated always as identity primary key);"
        "create table audit (id bigint primary key, batch uuid);"
        "select revision.track('ledger', branch_id => '0')"
    )


def writer(connection: psycopg.Connection[Any]) -> Callable[[int], None]:
    """Return a function that writes a number of rows into the ledger."""

    def insert(rows: int) -> None:
        connection.execute("insert into ledger select from generate_series(1, %s)", [rows])

    return insert


def audit(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
    for change in changes:
        connection.execute("insert into audit values (%s, %s)", [change.id, batch.id])


def operator(conn_id: str, **arguments: Any) -> BatchOperator:
    given = {"process": audit, "feed": FEED, "postgres_conn_id": conn_id, **arguments}
    return BatchOperator(task_id="audit", **given)


def run(task: Any) -> Any:
    return task.execute({})
