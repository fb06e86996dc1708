"""Topology: what changed in the catalogue of a cluster, in the order of commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal

from psycopg import sql

from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import FEEDS, Goal, Position
from airflow_pgchange.feeds.points import refuse_commit
from airflow_pgchange.feeds.queries import call, select


@dataclass(frozen=True)
class TopologyFeed:
    """The events of a catalogue behind a consumer's (term, index), exactly once per consumer and in their order.

    A change's ``id`` is ``term/index``, its ``data`` the event: ``op``, ``map`` and what changed. Raises
    InvalidArgument for an empty name.
    """

    kind: ClassVar[str] = "topology"
    progress: ClassVar[Literal["results", "source"]] = "results"
    schema_version: ClassVar[int] = 1
    sharded: ClassVar[bool] = False
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "text"),
        ("term", "bigint"),
        ("index", "bigint"),
        ("event", "jsonb"),
        ("written_at", "timestamptz"),
    )

    consumer_id: str

    def __post_init__(self) -> None:
        if not self.consumer_id or not isinstance(self.consumer_id, str):
            raise InvalidArgument("consumer_id must be a text that is not empty")

    @property
    def name(self) -> str:
        return f"topology:{self.consumer_id}"

    def register(self) -> sql.Composed:
        return select("topology.register", self.consumer_id)

    def lock(self) -> sql.Composed:
        return select("topology.take_lock", self.consumer_id)

    def locked(self) -> sql.Composed:
        return select("topology.locked", self.consumer_id)

    def position(self) -> sql.Composed:
        return select("topology.position", self.consumer_id)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("topology.lag", position, upto)

    def choose(self, position: Position, limit: int) -> None:
        return None

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        return select("topology.claim", self.consumer_id, position, limit, max_attempts)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call("topology.changes", part.after, part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        return Change(id=row["id"], position=row["id"], created_at=row["written_at"], data=row["event"])

    def point(self) -> sql.Composed:
        return select("topology.point")

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        refuse_commit(self, goal)
        return select("topology.passed", position, goal)

    def ack(self, batch: Batch) -> sql.Composed:
        return select("topology.ack", self.consumer_id, batch.to_json())

    def in_work(self, position: Position) -> sql.Composed:
        return select("topology.in_work", self.consumer_id, position)

    def note_failure(self, batch: Batch, error: str) -> sql.Composed:
        return select("topology.note_failure", self.consumer_id, batch.to_json(), error)

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        return select("topology.skip", self.consumer_id, row, reason)

    def mark(self) -> sql.Composed:
        return select("topology.mark", self.consumer_id)

    def adopt_mark(self, mark: Mapping[str, Any] | None) -> sql.Composed:
        return select("topology.adopt_mark", self.consumer_id, mark)

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        if at is not None:
            raise InvalidArgument(
                f"{self.name} can move to beginning or now, not to {at}: its log goes by term and index"
            )
        return self.point()

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        return select("topology.note_move", self.consumer_id, position, point)

    def move_to(self, point: Any, version: int) -> sql.Composed:
        return select("topology.move_consumer", self.consumer_id, point, version)

    def known(self) -> sql.Composed:
        return select("topology.is_known", self.consumer_id)

    def forget(self) -> sql.Composed:
        return select("topology.drop_consumer", self.consumer_id)


FEEDS[TopologyFeed.kind] = TopologyFeed
