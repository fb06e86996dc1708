"""Tubes: ids that were touched in tables, each to be read anew and replayed by one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from psycopg import sql

from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import FEEDS, Goal, Position
from airflow_pgchange.feeds.points import refuse_commit
from airflow_pgchange.feeds.queries import call, select


@dataclass(frozen=True)
class TubeFeed:
    """The touched ids of a worker's shards, each once a batch and never in two batches at once.

    Worker ``worker`` of ``workers``, numbered from 0, has the shards whose number leaves that remainder. Incremental
    pods come before those of a backfill, each kind in the order of seq; a pod is deleted when all its ids are done.
    Progress is kept where the tube is: exactly once for results in the same database, at least once elsewhere. Raises
    InvalidArgument for an empty name, and for a worker that is none of so many.
    """

    kind: ClassVar[str] = "tube"
    progress: ClassVar[Literal["results", "source"]] = "source"
    schema_version: ClassVar[int] = 1
    sharded: ClassVar[bool] = True
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "bigint"),
        ("shard", "integer"),
        ("seq", "bigint"),
        ("backfill", "boolean"),
        ("payload", "jsonb"),
        ("touched_at", "timestamptz"),
    )

    tube: str
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if not self.tube or not isinstance(self.tube, str):
            raise InvalidArgument("tube must be the name of a tube")
        for name in ("worker", "workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgument(f"{name} must be a number, not {value!r}")
        if not 1 <= self.workers <= 999:
            raise InvalidArgument(f"from 1 to 999 workers can share a tube, not {self.workers}")
        if not 0 <= self.worker < self.workers:
            raise InvalidArgument(
                f"there is no worker {self.worker} of {self.workers}: they are numbered from 0"
            )

    @property
    def name(self) -> str:
        return f"tube:{self.tube}/{self.worker}"

    def register(self) -> sql.Composed:
        return select("tube.register", self.tube, self.workers, self.worker)

    def lock(self) -> sql.Composed:
        return select("tube.take_lock", self.tube, self.worker)

    def locked(self) -> sql.Composed:
        return select("tube.locked", self.tube, self.worker)

    def position(self) -> sql.Composed:
        return select("tube.position", self.tube, self.worker)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("tube.lag", self.tube, self.workers, self.worker, position, upto)

    def choose(self, position: Position, limit: int) -> None:
        return None

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        return select("tube.claim", self.tube, self.workers, self.worker, position, limit, max_attempts)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call("tube.changes", self.tube, self.worker, batch.bounds, part.after, part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("shard", "backfill", "payload")}
        return Change(id=row["id"], position=str(row["seq"]), created_at=row["touched_at"], data=data)

    def attached(self) -> sql.Composed:
        """source, any server: what touches this worker's shards, as ``Attached.all`` takes it."""
        return select("tube.attached_to", self.tube, self.workers, self.worker)

    def point(self) -> sql.Composed:
        return select("tube.point", self.tube)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        refuse_commit(self, goal)
        return select("tube.passed", self.tube, self.workers, self.worker, position, goal)

    def ack(self, batch: Batch) -> sql.Composed:
        return select("tube.ack", self.tube, self.worker, batch.to_json())

    def in_work(self, position: Position) -> sql.Composed:
        return select("tube.in_work", self.tube, self.worker)

    def note_failure(self, batch: Batch, error: str) -> sql.Composed:
        return select("tube.note_failure", self.tube, self.worker, batch.to_json(), error)

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        return select("tube.skip", self.tube, self.worker, row, reason)


@dataclass(frozen=True)
class AllTubes:
    """Every worker of every tube of a database, to wait for: ready is what is ready for workers that are not at work.

    Tubes that are made later are among them. A worker whose batch has just failed, or its control pods where it has
    nothing else to do, is not, for half a minute, and longer each time that it fails again, up to five minutes: so it
    neither runs again and again nor keeps the others waiting.
    """

    kind: ClassVar[str] = "tubes"
    progress: ClassVar[Literal["results", "source"]] = "source"

    @property
    def name(self) -> str:
        return "all tubes"

    def position(self) -> sql.Composed:
        return select("tube.positions")

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("tube.lag_of_idle", upto)

    def locked(self) -> sql.Composed:
        return sql.SQL("select {}").format(False)


FEEDS[TubeFeed.kind] = TubeFeed
FEEDS[AllTubes.kind] = AllTubes
