"""Message queues: the messages of a queue, each to one worker of a consumer."""

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
class QueueFeed:
    """The messages of a queue that one of its consumers receives, without any order but what ``consume_after`` asks for.

    Up to 64 workers may have batches of one consumer at once; what one of them has, the others and who consumes by SQL
    skip, and ``mbus.take`` waits for. A batch is the same when it is tried again, unless a message of it was taken
    meanwhile. Exactly once for results in the queue's database, at least once elsewhere.

    A change's ``id`` is the message's iid, its ``data`` has ``data``, ``properties`` and ``headers``: JSON objects of
    texts or nulls, as hstore is. Raises InvalidArgument for an empty name.
    """

    kind: ClassVar[str] = "queue"
    progress: ClassVar[Literal["results", "source"]] = "source"
    schema_version: ClassVar[int] = 1
    sharded: ClassVar[bool] = False
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "text"),
        ("number", "bigint"),
        ("data", "jsonb"),
        ("properties", "jsonb"),
        ("headers", "jsonb"),
        ("added", "timestamptz"),
    )

    queue: str
    consumer: str = "default"

    def __post_init__(self) -> None:
        for name in ("queue", "consumer"):
            value = getattr(self, name)
            if not value or not isinstance(value, str):
                raise InvalidArgument(f"{name} must be the name of a {name}, not {value!r}")

    @property
    def name(self) -> str:
        return f"queue:{self.queue}/{self.consumer}"

    def register(self) -> sql.Composed:
        # A consumer is made with its queue, or by its owner: its position is there.
        return self._select("mbus.feed_position")

    def lock(self) -> sql.Composed:
        return self._select("mbus.feed_lock")

    def locked(self) -> sql.Composed:
        return self._select("mbus.feed_locked")

    def position(self) -> sql.Composed:
        return self._select("mbus.feed_position")

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return self._select("mbus.feed_lag", upto)

    def choose(self, position: Position, limit: int) -> None:
        return None

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        return self._select("mbus.feed_claim", position, limit, max_attempts)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call("mbus.feed_changes", self.queue, self.consumer, batch.bounds, part.after, part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("data", "properties", "headers")}
        return Change(id=row["id"], position=str(row["number"]), created_at=row["added"], data=data)

    def point(self) -> sql.Composed:
        return select("mbus.feed_point", self.queue)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        refuse_commit(self, goal)
        return self._select("mbus.feed_passed", goal)

    def ack(self, batch: Batch) -> sql.Composed:
        return self._select("mbus.feed_ack", batch.to_json())

    def in_work(self, position: Position) -> sql.Composed:
        return self._select("mbus.feed_in_work", position)

    def note_failure(self, batch: Batch, error: str) -> sql.Composed:
        return self._select("mbus.feed_note_failure", batch.to_json(), error)

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        return self._select("mbus.feed_skip", row, reason)

    def _select(self, function: str, *arguments: Any) -> sql.Composed:
        return select(function, self.queue, self.consumer, *arguments)


FEEDS[QueueFeed.kind] = QueueFeed
