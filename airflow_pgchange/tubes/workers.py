"""The workers of tubes: what is ready for them, and how they stand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import ask, call, rows
from airflow_pgchange.feeds.tube import TubeFeed


@dataclass(frozen=True)
class WorkerStatus:
    """A worker of a tube. Ages in seconds; ``ready`` exact up to 1,000; ``attempt`` is that of its batch in work."""

    tube: str
    worker: int
    workers: int
    ready: int
    ready_exact: bool
    oldest_seconds: float | None
    waiting: int
    faults: int
    at_work: bool
    batch_id: Any
    attempt: int | None
    claimed_at: datetime | None
    updated_at: datetime | None

    @property
    def feed(self) -> TubeFeed:
        return TubeFeed(self.tube, self.worker, self.workers)


def status(connection: psycopg.Connection[Any]) -> list[WorkerStatus]:
    """Every worker of every tube that this role may read."""
    with translated(), connection.cursor(row_factory=class_row(WorkerStatus)) as cursor:
        return cursor.execute("select * from tube.status()").fetchall()


def ready(connection: psycopg.Connection[Any]) -> list[TubeFeed]:
    """The workers, of all tubes of this database that we may empty, that have something to do and are not at work."""
    query = """
        select tube, worker, workers from tube.status(1)
        where ready > 0 and not at_work and has_table_privilege((tube.named(tube)).pods, 'delete')
        order by tube, worker
    """
    return [TubeFeed(*row) for row in rows(connection, query)]


def worker(connection: psycopg.Connection[Any], tube: str, number: int) -> TubeFeed:
    """A worker of a tube, of as many as share it now. Raises UnknownConsumer, and InvalidArgument for a wrong number."""
    return TubeFeed(
        tube, number, ask(connection, sql.SQL("select ({}).partitions").format(call("tube.named", tube)))
    )
