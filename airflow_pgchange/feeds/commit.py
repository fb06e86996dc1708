"""The commit queue: every commit of a branch, each consumer with a watermark of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal

from psycopg import sql

from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import FEEDS, Goal, Position
from airflow_pgchange.feeds.queries import call, select


@dataclass(frozen=True)
class CommitFeed:
    """Every commit of one branch, exactly once per consumer, whichever server of the group it is read from.

    ``in_order``: by transaction id, and only below the oldest open transaction; otherwise each commit as soon as it is
    visible. ``accept_trimmed``: a new consumer does without the history that was trimmed before it came.
    Raises InvalidArgument for an empty name, and for what is no branch's id.
    """

    kind: ClassVar[str] = "commit"
    progress: ClassVar[Literal["results", "source"]] = "results"
    schema_version: ClassVar[int] = 1
    sharded: ClassVar[bool] = False
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "bigint"),
        ("queue_id", "bigint"),
        ("txid", "bigint"),
        ("created_at", "timestamptz"),
    )

    consumer_id: str
    branch_id: int
    in_order: bool = False
    accept_trimmed: bool = False

    def __post_init__(self) -> None:
        if not self.consumer_id or not isinstance(self.consumer_id, str):
            raise InvalidArgument("consumer_id must be a text that is not empty")
        if isinstance(self.branch_id, bool) or not isinstance(self.branch_id, int) or self.branch_id < 0:
            raise InvalidArgument(
                f"branch_id must be the id of a branch (0 is trunk), not {self.branch_id!r}"
            )

    @property
    def name(self) -> str:
        return f"{self.consumer_id}/{self.branch_id}"

    def register(self) -> sql.Composed:
        return select("pubsub.register", self.consumer_id, self.branch_id, self.in_order)

    def lock(self) -> sql.Composed:
        return sql.SQL("select pg_catalog.pg_try_advisory_xact_lock({})").format(
            call("pubsub.lock_key", self.consumer_id, self.branch_id)
        )

    def locked(self) -> sql.Composed:
        return select("pubsub.locked", self.consumer_id, self.branch_id)

    def position(self) -> sql.Composed:
        return select("pubsub.position", self.consumer_id, self.branch_id)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("pubsub.lag", self.branch_id, position, upto, self.in_order)

    def choose(self, position: Position, limit: int) -> sql.Composed:
        return select("pubsub.choose", self.branch_id, position, limit, self.in_order)

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        return select(
            "pubsub.claim",
            self.consumer_id,
            self.branch_id,
            position,
            limit,
            self.in_order,
            self.accept_trimmed,
            choice,
            max_attempts,
        )

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call("pubsub.changes", self.branch_id, batch.bounds, *part.after, *part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        return Change(id=row["id"], position=f"{row['txid']}/{row['queue_id']}", created_at=row["created_at"])

    def point(self) -> sql.Composed:
        return select("pubsub.point", self.branch_id)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        return select("pubsub.passed", self.branch_id, position, goal)

    def ack(self, batch: Batch) -> sql.Composed:
        return select("pubsub.ack", self.consumer_id, self.branch_id, batch.to_json())

    def in_work(self, position: Position) -> sql.Composed:
        return select("pubsub.in_work", self.consumer_id, self.branch_id, position)

    def note_failure(self, batch: Batch, error: str) -> sql.Composed:
        return select("pubsub.note_failure", self.consumer_id, self.branch_id, batch.to_json(), error)

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        return select("pubsub.skip", self.consumer_id, self.branch_id, row, reason)

    def mark(self) -> sql.Composed:
        return select("pubsub.mark", self.consumer_id, self.branch_id)

    def adopt_mark(self, mark: Mapping[str, Any] | None) -> sql.Composed:
        return select("pubsub.adopt_mark", self.consumer_id, self.branch_id, mark)

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        return select("pubsub.point", self.branch_id, at)

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        return select(
            "pubsub.note_move", self.consumer_id, self.branch_id, position, point or {"snapshot": None}
        )

    def move_to(self, point: Any, version: int) -> sql.Composed:
        return select(
            "pubsub.move_consumer", self.consumer_id, self.branch_id, point or {"snapshot": None}, version
        )

    def known(self) -> sql.Composed:
        return select("pubsub.is_known", self.consumer_id, self.branch_id)

    def forget(self) -> sql.Composed:
        return select("pubsub.drop_consumer", self.consumer_id, self.branch_id)


FEEDS[CommitFeed.kind] = CommitFeed
