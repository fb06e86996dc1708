"""A process of the campaign of a Delta table: it appends the changes of each batch to the table."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake import Delta, write
from airflow_pgchange.lake.delta import commits, log
from tests.chaos.lake_worker import ROWS, Worker

STEPS = ("claimed", "looked", "moved", "acked", "committed")
"""Between ``looked`` and ``moved`` the worker has looked for its batch in the log, and not committed. Between ``moved``
and ``committed`` the table has the batch, and PostgreSQL has not committed."""
ONE_LOOK = "repeats a commit without another look"
"""The planted fault."""


@dataclass(frozen=True)
class DeltaWorker(Worker):
    """``fault``: none, or ``ONE_LOOK``."""

    @property
    def target(self) -> Delta:
        return Delta(str(Path(self.folder) / "delta"))

    def at(self, step: str, chance: random.Random) -> None:
        super().at(step, chance)
        # To write the files takes longer than a step, and kills would find few processes elsewhere.
        time.sleep(chance.random() * 0.2)

    def is_at(self, step: str) -> bool:
        return self.step.exists() and self.step.read_text() == step

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.delta_worker", json.dumps(asdict(self))]

    def work(self) -> None:
        chance = random.Random(f"{self.seed} looks")
        look, commit, looked = log.Write.version_in, commits._is_committed, set()

        def version_in(write: log.Write, table: DeltaTable) -> int | None:
            attempt = (write.batch.id, write.batch.attempt)
            if self.fault == ONE_LOOK and attempt in looked:
                return None
            looked.add(attempt)
            return look(write, table)

        def is_committed(*arguments: Any) -> bool:
            self.at("looked", chance)
            return commit(*arguments)

        log.Write.version_in, commits._is_committed = version_in, is_committed  # type: ignore[method-assign]
        super().work()

    def write(
        self, connection: psycopg.Connection[Any], batch: Batch, ids: list[Any], chance: random.Random
    ) -> None:
        write(connection, batch, self.target, pa.table({"id": pa.array(ids, pa.int64())}, ROWS))
        self.at("moved", chance)


if __name__ == "__main__":
    DeltaWorker(**json.loads(sys.argv[1])).work()
