"""A process of the campaign of a lake: it appends the changes of each batch to an Iceberg table."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
from pyiceberg.table import CommitTableResponse, Table

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake import Iceberg, RemoteIceberg, write
from airflow_pgchange.lake.iceberg import remote_catalog
from airflow_pgchange.lake.iceberg.history import Write
from airflow_pgchange.lake.tables import LakeTable

FEED, TABLE = CommitFeed("chaos", 0), "sales.payment"
STEPS = ("claimed", "moved", "acked", "committed")
"""The steps of a worker.

The pointer to the metadata is moved at ``moved``, and the move is committed at ``committed``.
"""
REMOTE_STEPS = ("claimed", "looked", "moved", "acked", "committed")
"""The steps with an external catalog.

At ``looked`` the worker has searched the table for its batch and has not committed. At ``moved`` the catalog has
committed, and PostgreSQL has not.
"""
PAUSE = 0.05
"""The maximum pause in seconds at a step, so that kills find a process there."""
ROWS = pa.schema([("id", pa.int64())])
TWO_COMMITS = "moves the pointer on a connection of its own, and forgets the batch"
ONE_LOOK = "repeats a commit without another look"
"""The planted faults."""


@dataclass(frozen=True)
class Worker:
    """A worker. ``remote`` means that the table is in a REST catalog. ``fault`` is empty, or a planted fault."""

    number: int
    source: str
    folder: str
    seed: str
    remote_catalog: bool = False
    fault: str = ""

    @property
    def step(self) -> Path:
        return Path(self.folder) / f"step-{self.number}"

    @property
    def table(self) -> LakeTable:
        return RemoteIceberg(TABLE, "rest") if self.remote else Iceberg(TABLE, "lake")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.lake_worker", json.dumps(asdict(self))]

    def work(self) -> None:
        chance, parent = random.Random(self.seed), os.getppid()
        self.note_looks(chance)
        while os.getppid() == parent:
            # The server may be stopped, or another process may hold the consumer.
            with suppress(PgChangeError, psycopg.Error):
                self.process(chance)
            time.sleep(0.01)

    def note_looks(self, chance: random.Random) -> None:
        look, commit, looked = remote_catalog.has, remote_catalog.OneTry.commit_table, set()

        def has(table: Table, write: Write) -> bool:
            attempt = (write.batch.id, write.batch.attempt)
            if self.fault == ONE_LOOK and attempt in looked:
                return False
            looked.add(attempt)
            return look(table, write)

        def commit_table(catalog: remote_catalog.OneTry, *request: Any) -> CommitTableResponse:
            self.at("looked", chance)
            return commit(catalog, *request)

        remote_catalog.has, remote_catalog.OneTry.commit_table = has, commit_table  # type: ignore[method-assign]

    def process(self, chance: random.Random) -> int:
        """Append a batch, and return the number of its changes."""
        with ConsumerTransaction(FEED, self.source, busy_timeout=2) as transaction:
            batch = transaction.claim(chance.choice([1, 7, 50, 1000]))
            if batch is None:
                return 0
            self.at("claimed", chance)
            ids = [change.id for change in transaction.changes()]
            transaction.ack(lambda connection: self.write(connection, batch, ids, chance))
            self.at("acked", chance)
        self.at("committed", chance)
        return batch.count

    def write(
        self, connection: psycopg.Connection[Any], batch: Batch, ids: list[Any], chance: random.Random
    ) -> None:
        two = self.fault == TWO_COMMITS
        another = psycopg.connect(self.source, autocommit=True) if two else nullcontext(connection)
        # Let the batch have another id, because the second attempt would find the first by the id.
        known = replace(batch, id=uuid4().hex) if two else batch
        with another as used, used.transaction() if two else nullcontext():
            write(used, known, self.table, pa.table({"id": pa.array(ids, pa.int64())}, ROWS))
        self.at("moved", chance)

    def at(self, step: str, chance: random.Random) -> None:
        # Write the file in one step: the campaign may read it after this process was stopped at any moment.
        part = self.step.with_suffix(".part")
        part.write_text(step)
        part.replace(self.step)
        time.sleep(chance.random() * PAUSE)


if __name__ == "__main__":
    Worker(**json.loads(sys.argv[1])).work()
