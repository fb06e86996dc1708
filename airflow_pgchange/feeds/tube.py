"""The feed of tubes: ids that were touched in tables. One worker reads each row again and replays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal, Self

from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import is_name
from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.consumer_names import NUMBER, TEXT, Names
from airflow_pgchange.feeds.feed import Ask, Goal, Position
from airflow_pgchange.feeds.feed_kinds import kind_of_feed
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.queries import call, select
from airflow_pgchange.feeds.schema_feed import SchemaFeed
from airflow_pgchange.feeds.schemas import our_schema

our_schema("tube")


@kind_of_feed
@dataclass(frozen=True)
class TubeFeed(SchemaFeed):
    """The touched ids of a worker's shards. An id is at most once in a batch, and never in two batches at once.

    Workers are numbered from 0. A worker has the shards with ``shard % workers == worker``. Incremental pods come
    before the pods of a backfill, both in the order of seq. A pod is deleted when all its ids are processed. If the
    batch was split, its pods are deleted with its last part. Progress is kept in the tube's database: results there are
    exactly once, results elsewhere at least once. Raises InvalidArgument for an empty name and for an invalid number of
    a worker.
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
        "`airflow-pgchange skip` gives up its batch, tube.tube_ensure_absent() removes a tube",
    )

    tube: str
    worker: int = 0
    workers: int = 1
    start: InitVar[object] = None

    def __post_init__(self, start: object) -> None:
        if start is not None:
            raise InvalidArgument(
                "the worker of a tube has no start: it begins with the rows that change after their table is "
                "attached. Use a backfill for the rows from before"
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
        """The tube, the number of workers and the worker: the first arguments of the tube's functions."""
        return self.tube, self.workers, self.worker

    def register(self) -> sql.Composed:
        return select("tube.register", *self.share)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("tube.lag", *self.share, position, upto)

    @classmethod
    def lags(cls, asked: Sequence[tuple[Self, Position, int]]) -> sql.Composed:
        each = [
            {
                "tube": feed.tube,
                "workers": feed.workers,
                "worker": feed.worker,
                "position": dict(at),
                "upto": upto,
            }
            for feed, at, upto in asked
        ]
        return select("tube.lags", Jsonb(each))

    def _claim_options(self, choice: Mapping[str, Any] | None) -> tuple[Any, ...]:
        return (self.workers,)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        function = "tube.changes" if batch.key == BIGINT else "tube.key_changes"
        return call(function, *self.parts, batch.bounds, part.after, part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("shard", "backfill", "payload")}
        return Change(id=row["id"], position=str(row["seq"]), created_at=row["touched_at"], data=data)

    def attached(self) -> sql.Composed:
        """At any server of the source: the tables attached to this worker's shards, for ``Attached.all``."""
        return select("tube.attached_to", *self.share)

    def key_types(self) -> sql.Composed:
        """At any server of the source: the types of the columns of the tube's ids, as ``Batch.key`` has them."""
        return sql.SQL("select pg_catalog.to_jsonb(({}).key::text[])").format(call("tube.named", self.tube))

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


@kind_of_feed
@dataclass(frozen=True)
class AllTubes:
    """Every worker of every tube of a database, for triggers and sensors. Ready changes of idle workers count as ready.

    Tubes that are created later are included. A worker whose batch has just failed does not count for half a minute, and
    for longer after each further failure, up to five minutes. The same holds for failed control pods if the worker has
    nothing else to do. So a failing worker is not started again and again, and does not keep the others waiting.
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
