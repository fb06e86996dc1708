"""The feed of the event log: each group gets the events that its subscriptions choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from psycopg import sql

from airflow_pgchange.feeds.argument_checks import check_group_name
from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.consumer_names import TEXT, Names
from airflow_pgchange.feeds.feed import Goal, Position
from airflow_pgchange.feeds.feed_kinds import kind_of_feed
from airflow_pgchange.feeds.queries import call, select
from airflow_pgchange.feeds.schema_feed import OfferedFeed
from airflow_pgchange.feeds.schemas import our_schema

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FEW = 250
"""Up to this number of events, PostgreSQL may collect all before it sends the first."""

our_schema("pgmb")


@kind_of_feed
@dataclass(frozen=True)
class EventFeed(OfferedFeed):
    """The events of one group, exactly once and in the order of dispatch, each with the subscriptions that chose it.

    The group's cursor is kept with the results, also if they are in another database than the subscriptions. Claims and
    queries of the lag dispatch published events, so no other process is needed. Raises InvalidArgument for an invalid
    group name.
    """

    kind: ClassVar[str] = "event"
    schema: ClassVar[str] = "pgmb"
    names: ClassVar[Names] = Names("events:{}", (TEXT,), "events:mails")
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
        super().__post_init__()
        check_group_name(self.group)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return self._select("lag", position, upto)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        alone = batch.bounds["alone"]
        arguments = [self.group, part.after, part.upto, batch.bounds["lowest"], batch.bounds["highest"]]
        if part.count <= FEW:
            function, arguments = "pgmb.some_events", [*arguments, alone]
        else:
            # "alone": each dispatch has events of only one subscription, so its events are stored in order. They need no
            # sort.
            function = "pgmb.events_alone" if alone else "pgmb.events_shared"
        return call(function, *arguments)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("topic", "payload", "metadata", "subscription_ids")}
        cursor = f"{row['dispatch']}{row['rank']:09x}"
        return Change(id=row["id"], position=cursor, created_at=published_at(row["id"]), data=data)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        return self._select("passed", position, goal)

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        return select("pgmb.point_of", at)


def published_at(event_id: str) -> datetime:
    """Return the time in an event's id: of its publication, or of its planned delivery."""
    return EPOCH + timedelta(microseconds=int(event_id[2:15], 16))
