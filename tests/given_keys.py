"""Changes with keys of any type, defined by a table of texts, for tests of the code after a feed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.connections import begun, connect
from airflow_pgchange.feeds.consumer_names import NUMBER, Names
from airflow_pgchange.feeds.keys import Key, text
from airflow_pgchange.results.merge import merge
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.request import Work
from airflow_pgchange.topology.bucket_owners import Cluster
from tests.spark_session import spark_session


@dataclass(frozen=True)
class GivenFeed:
    """A feed whose changes are the rows of the table ``public.given``."""

    kind: ClassVar[str] = "given"
    name: ClassVar[str] = "given"
    sharded: ClassVar[bool] = False
    columns: ClassVar[tuple[tuple[str, str], ...]] = (("id", "text"), ("created_at", "timestamptz"))
    names: ClassVar[Names] = Names("given:{}", (NUMBER,), "given:0")

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return sql.SQL("(select id, now() as created_at from public.given order by n) as g").format()

    def change(self, row: Any) -> Change:
        return Change(row["id"], "0", row["created_at"])


def given(connection: psycopg.Connection[Any], keys: Sequence[Key]) -> None:
    """Let the consumer's next changes have these keys."""
    connection.execute(
        'drop table if exists given; create table given (id text collate "C", n int generated always as identity)'
    )
    with connection.cursor() as cursor:
        cursor.executemany("insert into given (id) values (%s)", [(text(key),) for key in keys])


@contextmanager
def job_of(conninfo: str, types: Sequence[str], count: int, cluster: Cluster | None = None) -> Iterator[Job]:
    """A job over the given changes, whose keys have these types. Its staged results are merged at the end."""
    bounds = {"key": list(types)}
    batch = Batch("b1", "given", 1, 1, count, (Slice(count, 0, count),), bounds)
    job = Job(spark_session(), Work(GivenFeed(), batch, conninfo, conninfo, cluster))  # type: ignore[arg-type]
    yield job
    with connect(conninfo, primary=True) as connection, begun(connection):
        merge(connection, batch, job.staged)
