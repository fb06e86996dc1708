"""The commit queue: every commit of a branch, each consumer with a watermark of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.feeds.batch import Batch, Change, Partition, Slice, grouped
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import FEEDS, Position


@dataclass(frozen=True)
class CommitFeed:
    """Every commit of one branch, exactly once per consumer, whichever server of the group it is read from.

    ``in_order``: by transaction id, and only below the oldest open transaction; otherwise each commit as soon as it is
    visible. ``accept_trimmed``: a new consumer does without the history that was trimmed before it came.
    """

    kind: ClassVar[str] = "commit"
    schema_version: ClassVar[int] = 1
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "bigint"),
        ("queue_id", "bigint"),
        ("txid", "bigint"),
        ("created_at", "timestamptz"),
    )

    consumer_id: str
    branch_id: int = 0
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
        return _call("pubsub.register", self.consumer_id, self.branch_id)

    def lock(self) -> sql.Composed:
        return sql.SQL("select pg_catalog.pg_try_advisory_xact_lock({})").format(self._key())

    def wait_for_lock(self) -> sql.Composed:
        return sql.SQL("select pg_catalog.pg_advisory_xact_lock({})").format(self._key())

    def locked(self) -> sql.Composed:
        return _call("pubsub.locked", self.consumer_id, self.branch_id)

    def position(self) -> sql.Composed:
        return _call("pubsub.position", self.consumer_id, self.branch_id)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return _call("pubsub.lag", self.branch_id, Jsonb(position), upto, self.in_order)

    def choose(self, position: Position, limit: int) -> sql.Composed:
        return _call("pubsub.choose", self.branch_id, Jsonb(position), limit, self.in_order)

    def claim(self, position: Position, limit: int, choice: Mapping[str, Any] | None) -> sql.Composed:
        return _call(
            "pubsub.claim",
            self.consumer_id,
            self.branch_id,
            Jsonb(position),
            limit,
            self.in_order,
            self.accept_trimmed,
            None if choice is None else Jsonb(choice),
        )

    def batch(self, row: Mapping[str, Any]) -> Batch:
        return Batch.from_json({**row, "feed": self.name})

    def partitions(self, batch: Batch, n: int) -> list[Partition]:
        return [
            Partition(_changes(self.branch_id, batch.bounds, part).as_string(None), part.count)
            for part in grouped(batch.slices, n)
        ]

    def change(self, row: Mapping[str, Any]) -> Change:
        return Change(id=row["id"], position=f"{row['txid']}/{row['queue_id']}", created_at=row["created_at"])

    def ack(self, batch: Batch) -> sql.Composed:
        return _call("pubsub.ack", self.consumer_id, self.branch_id, Jsonb(batch.to_json()))

    def _key(self) -> sql.Composed:
        return _call("pubsub.lock_key", self.consumer_id, self.branch_id, select=False)


def _call(function: str, *arguments: Any, select: bool = True) -> sql.Composed:
    call = sql.SQL("{}({})").format(
        sql.Identifier(*function.split(".")), sql.SQL(", ").join(map(sql.Literal, arguments))
    )
    return sql.SQL("select {}").format(call) if select else call


def _changes(branch_id: int, bounds: Mapping[str, Any], part: Slice) -> sql.Composed:
    arguments = (branch_id, Jsonb(dict(bounds)), *part.after, *part.upto)
    return sql.SQL("select id, queue_id, txid, created_at from {}").format(
        _call("pubsub.changes", *arguments, select=False)
    )


FEEDS[CommitFeed.kind] = CommitFeed
