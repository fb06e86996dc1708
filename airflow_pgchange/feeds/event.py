"""The event log: events with payloads, to each group those that its subscriptions choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal

from psycopg import sql

from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.checks import check_group_name
from airflow_pgchange.feeds.feed import FEEDS, Goal, Position
from airflow_pgchange.feeds.points import refuse_commit
from airflow_pgchange.feeds.queries import call, select

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FEW = 250
"""Events that PostgreSQL may collect before it sends the first."""


@dataclass(frozen=True)
class EventFeed:
    """The events of one group, exactly once and in the order of dispatch, each with the subscriptions that chose it.

    A group that has results in another database than its subscriptions keeps its cursor there. Claims and looks at the
    lag dispatch what is published, so no other process is needed. Raises InvalidArgument for an invalid group name.
    """

    kind: ClassVar[str] = "event"
    progress: ClassVar[Literal["results", "source"]] = "results"
    schema_version: ClassVar[int] = 1
    sharded: ClassVar[bool] = False
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "text"),
        ("topic", "text"),
        ("payload", "jsonb"),
        ("metadata", "jsonb"),
        ("subscription_ids", "text[]"),
        ("dispatch", "text"),
        ("rank", "bigint"),
    )

    group: str

    def __post_init__(self) -> None:
        check_group_name(self.group)

    @property
    def name(self) -> str:
        return f"events:{self.group}"

    def register(self) -> sql.Composed:
        return select("pgmb.register", self.group)

    def lock(self) -> sql.Composed:
        return sql.SQL("select pg_catalog.pg_try_advisory_xact_lock({})").format(
            call("pgmb.lock_key", self.group)
        )

    def locked(self) -> sql.Composed:
        return select("pgmb.locked", self.group)

    def position(self) -> sql.Composed:
        return select("pgmb.position", self.group)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("pgmb.lag", self.group, position, upto)

    def choose(self, position: Position, limit: int) -> None:
        return None

    def claim(
        self, position: Position, limit: int, choice: Mapping[str, Any] | None, max_attempts: int | None
    ) -> sql.Composed:
        return select("pgmb.claim", self.group, position, limit, max_attempts)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        alone = batch.bounds["alone"]
        arguments = [self.group, part.after, part.upto, batch.bounds["lowest"], batch.bounds["highest"]]
        if part.count <= FEW:
            function, arguments = "pgmb.some_events", [*arguments, alone]
        else:
            # Where each dispatch is of one subscription no order has to be made.
            function = "pgmb.events_alone" if alone else "pgmb.events_shared"
        return call(function, *arguments)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("topic", "payload", "metadata", "subscription_ids")}
        cursor = f"{row['dispatch']}{row['rank']:09x}"
        return Change(id=row["id"], position=cursor, created_at=published_at(row["id"]), data=data)

    def point(self) -> sql.Composed:
        return select("pgmb.point")

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        refuse_commit(self, goal)
        return select("pgmb.passed", self.group, position, goal)

    def ack(self, batch: Batch) -> sql.Composed:
        return select("pgmb.ack", self.group, batch.to_json())

    def in_work(self, position: Position) -> sql.Composed:
        return select("pgmb.in_work", self.group, position)

    def note_failure(self, batch: Batch, error: str) -> sql.Composed:
        return select("pgmb.note_failure", self.group, batch.to_json(), error)

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        return select("pgmb.skip", self.group, row, reason)

    def mark(self) -> sql.Composed:
        return select("pgmb.mark", self.group)

    def adopt_mark(self, mark: Mapping[str, Any] | None) -> sql.Composed:
        return select("pgmb.adopt_mark", self.group, mark)

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        return select("pgmb.point_of", at)

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        return select("pgmb.note_move", self.group, position, point and point["cursor"])

    def move_to(self, point: Any, version: int) -> sql.Composed:
        cursor, source = (point["cursor"], point["source"]) if point else (None, None)
        return select("pgmb.move_group", self.group, cursor, version, source)

    def known(self) -> sql.Composed:
        known = sql.SQL("select exists (select from pgmb.subscription_groups where id = {})")
        return known.format(self.group)

    def forget(self) -> sql.Composed:
        return select("pgmb.drop_group", self.group)


def published_at(event_id: str) -> datetime:
    """The time in an event's id: when it was published, or was to be delivered."""
    return EPOCH + timedelta(microseconds=int(event_id[2:15], 16))


FEEDS[EventFeed.kind] = EventFeed
