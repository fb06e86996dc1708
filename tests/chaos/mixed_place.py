"""The databases of the consumers of the campaign over all feeds, and the processing of a batch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.feeds import Change
from tests.chaos.crew import end_work
from tests.chaos.event_worker import Batch
from tests.chaos.harness import harmed
from tests.chaos.steps import Reached

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Place:
    """The databases of a consumer. ``fault`` is empty, or a fault of ``harmed``."""

    source: str
    results: str
    folder: str
    seed: str
    groups: Sequence[str] = ()
    in_order: bool = False
    failures: float = 0.1
    fault: str = ""

    @property
    def chance(self) -> random.Random:
        return random.Random(f"{self.seed} {os.getpid()}")


@dataclass
class Notes:
    """A file with the records of a process, a line for each. A written line survives a kill of the process."""

    file: int

    @classmethod
    def of(cls, place: Place, kind: str) -> Notes:
        path = Path(place.folder) / f"{kind} {os.getpid()}.notes"
        return cls(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY))

    def write(self, **noted: Any) -> None:
        os.write(self.file, json.dumps(noted).encode() + b"\n")

    @staticmethod
    def read(folder: Path, whose: str) -> list[list[dict[str, Any]]]:
        """Return the records of a kind, of all processes or of one."""
        paths = sorted(folder.glob(f"{whose}*.notes"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


class Batches:
    """Processes batches of feeds, and writes their results in the consumer transaction."""

    def __init__(self, place: Place, log: Connection, reached: Reached) -> None:
        self.place, self.log, self.reached, self.chance = place, log, reached, place.chance
        end_work(log, os.getpid(), "cut off", "began")

    def feeds(self) -> Iterator[Batch]:
        """Process a batch of each feed."""
        raise NotImplementedError

    def round(self) -> int:
        """Process one batch of each feed, and return the number of changes."""
        return sum(batch.work(self.log, self.place, self.chance) for batch in self.feeds())

    @property
    def limit(self) -> int:
        return self.chance.choice([1, 7, 50, 1000])


def harmed_keep(
    place: Place, keep: Callable[[Connection, Sequence[Change]], None]
) -> Callable[[Connection, Sequence[Change]], None]:
    return lambda connection, changes: keep(connection, harmed(changes, place.fault))
