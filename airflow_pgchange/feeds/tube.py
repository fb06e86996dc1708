"""Tubes: ids that were touched in tables, each to be read anew and replayed by one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal, Self

from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.checks import is_name
from airflow_pgchange.feeds.feed import Ask, Goal, Position, kind_of_feed
from airflow_pgchange.feeds.names import NUMBER, TEXT, Names
from airflow_pgchange.feeds.offered import SchemaFeed
from airflow_pgchange.feeds.queries import call, select
from airflow_pgchange.feeds.schemas import our_schema

our_schema(
    "tube",
    grants="`tube.grant_consumer('<role>')` is for all, `grant_owner` for who makes tubes; on the pods insert (op, "
    "shard, ids, payload, ts) for who touches and attaches, select and delete for who works them",
)


@kind_of_feed
@dataclass(frozen=True)
class TubeFeed(SchemaFeed):
    """The touched ids of a worker's shards, each once a batch and never in two batches at once.

    Worker ``worker`` of ``workers``, numbered from 0, has the shards whose number leaves that remainder. Incremental
    pods come before those of a backfill, each kind in the order of seq; a pod is deleted when all its ids are done.
    Progress is kept where the tube is: exactly once for results in the same database, at least once elsewhere. Raises
    InvalidArgument for an empty name, and for a worker that is none of so many.
    """

    kind: ClassVar[str] = "tube"
    schema: ClassVar[str] = "tube"
    sharded: ClassVar[bool] = True
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "bigint"),
        ("shard", "integer"),
        ("seq", "bigint"),
        ("backfill", "boolean"),
        ("payload", "jsonb"),
        ("touched_at", "timestamptz"),
    )
    names: ClassVar[Names] = Names(
        "tube:{}/{}",
        (TEXT, NUMBER),
        "tube:copies/0",
        "`airflow pgchange skip` gives up its batch, tube.tube_ensure_absent() removes a tube",
    )

    tube: str
    worker: int = 0
    workers: int = 1
    start: InitVar[object] = None

    def __post_init__(self, start: object) -> None:
        if start is not None:
            raise InvalidArgument(
                "the worker of a tube has no start: it begins with the rows that change after their table is "
                "attached, and a backfill brings the rows from before"
            )
        if not is_name(self.tube):
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

    @classmethod
    def named(cls, ask: Ask, *parts: str) -> Self:
        tube, worker = parts
        return cls(tube, int(worker), ask(sql.SQL("select ({}).partitions").format(call("tube.named", tube))))

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.tube, self.worker

    @property
    def share(self) -> tuple[str, int, int]:
        """What is the worker's of the tube, as its functions take it."""
        return self.tube, self.workers, self.worker

    def register(self) -> sql.Composed:
        return select("tube.register", *self.share)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("tube.lag", *self.share, position, upto)

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        return select("tube.claim", *self.share, position, limit, max_attempts)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call("tube.changes", *self.parts, batch.bounds, part.after, part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("shard", "backfill", "payload")}
        return Change(id=row["id"], position=str(row["seq"]), created_at=row["touched_at"], data=data)

    def attached(self) -> sql.Composed:
        """source, any server: what touches this worker's shards, as ``Attached.all`` takes it."""
        return select("tube.attached_to", *self.share)

    def tables(self) -> sql.Composed:
        query = sql.SQL("""
            select coalesce(jsonb_agg(distinct jsonb_build_array(a ->> 'schema', a ->> 'name')), '[]')
            from jsonb_array_elements({}) as a
        """)
        return query.format(call("tube.attached_to", self.tube, self.workers, self.worker))

    def point(self) -> sql.Composed:
        return select("tube.point", self.tube)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        return select("tube.passed", *self.share, position, goal)

    def in_work(self, position: Position) -> sql.Composed:
        return self._select("in_work")


@kind_of_feed
@dataclass(frozen=True)
class AllTubes:
    """Every worker of every tube of a database, to wait for: ready is what is ready for workers that are not at work.

    Tubes that are made later are among them. A worker whose batch has just failed, or its control pods where it has
    nothing else to do, is not, for half a minute, and longer each time that it fails again, up to five minutes: so it
    neither runs again and again nor keeps the others waiting.
    """

    kind: ClassVar[str] = "tubes"
    progress: ClassVar[Literal["results", "source"]] = "source"
    covers: ClassVar[str | None] = TubeFeed.kind

    @property
    def name(self) -> str:
        return "all tubes"

    def position(self) -> sql.Composed:
        return select("tube.positions")

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("tube.lag_of_idle", upto)

    def locked(self) -> sql.Composed:
        return sql.SQL("select {}").format(False)
