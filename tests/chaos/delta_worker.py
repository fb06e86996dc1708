"""A process of the campaign of a lake that appends the changes of each batch to a Delta table."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from deltalake import DeltaTable

from airflow_pgchange.lake import Delta
from airflow_pgchange.lake.delta import commits, log
from tests.chaos.lake_worker import ONE_LOOK, Worker


@dataclass(frozen=True)
class DeltaWorker(Worker):
    """A worker for a Delta table.

    Its steps are those for an external catalog: the table's log is committed before PostgreSQL.
    """

    location: str = ""

    @property
    def table(self) -> Delta:
        return Delta(self.location)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.delta_worker", json.dumps(asdict(self))]

    def note_looks(self, chance: random.Random) -> None:
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

    def at(self, step: str, chance: random.Random) -> None:
        super().at(step, chance)
        # A pause at the files would be longer than all other steps, so almost every kill would hit it.
        time.sleep(chance.random() * 0.2)


if __name__ == "__main__":
    DeltaWorker(**json.loads(sys.argv[1])).work()
