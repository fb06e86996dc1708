"""The feed of the commit queue: every commit of a branch. Each consumer has a watermark of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Self

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
from airflow_pgchange.feeds.schema_feed import OfferedFeed
from airflow_pgchange.feeds.schemas import our_schema

BEGINNING = {"snapshot": None}
"""The point before all commits."""

our_schema("revision")
our_schema("pubsub")


@kind_of_feed
@dataclass(frozen=True)
class CommitFeed(OfferedFeed):
    """Every commit of one branch, exactly once per consumer, no matter from which server of the group it is read.

    With ``in_order`` commits come in the order of transaction ids, and only those below the oldest open transaction.
    Otherwise each commit comes as soon as it is visible. With ``accept_trimmed`` a new consumer accepts that the
    history before its creation was trimmed. Raises InvalidArgument for an empty name, and for an invalid branch id.
    """

    kind: ClassVar[str] = "commit"
    schema: ClassVar[str] = "pubsub"
    names: ClassVar[Names] = Names("commits:{}/{}", (TEXT, NUMBER), "commits:delays/0")
    sql_words: ClassVar[Mapping[str, str]] = {"consumer_id": "consumer", "branch_id": "branch"}
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "bigint"),
        ("queue_id", "bigint"),
        ("txid", "bigint"),
        ("created_at", "timestamptz"),
    )

    consumer: str
    branch: int
    in_order: bool = False
    accept_trimmed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_name(self.consumer):
            raise InvalidArgument("consumer must be a text that is not empty")
        if isinstance(self.branch, bool) or not isinstance(self.branch, int) or self.branch < 0:
            raise InvalidArgument(f"branch must be the id of a branch (0 is trunk), not {self.branch!r}")

    @classmethod
    def named(cls, ask: Ask, *parts: str) -> Self:
        consumer, branch = parts
        return cls(consumer, int(branch))

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.consumer, self.branch

    def register(self) -> sql.Composed:
        return self._select("register", self.in_order)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select("pubsub.lag", self.branch, position, upto, self.in_order)

    @classmethod
    def lags(cls, asked: Sequence[tuple[Self, Position, int]]) -> sql.Composed:
        each = [
            {"branch_id": feed.branch, "position": dict(at), "upto": upto, "in_order": feed.in_order}
            for feed, at, upto in asked
        ]
        return select("pubsub.lags", Jsonb(each))

    def choose(self, position: Position, limit: int) -> sql.Composed:
        return select("pubsub.choose", self.branch, position, limit, self.in_order)

    def _claim_options(self, choice: Mapping[str, Any] | None) -> tuple[Any, ...]:
        return self.in_order, self.accept_trimmed, choice

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        function = "pubsub.changes" if batch.key == BIGINT else "pubsub.keyed_changes"
        return call(function, self.branch, batch.bounds, *part.after, *part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        return Change(id=row["id"], position=f"{row['txid']}/{row['queue_id']}", created_at=row["created_at"])

    def point(self) -> sql.Composed:
        return select("pubsub.point", self.branch)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        return select("pubsub.passed", self.branch, position, goal)

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        return select("pubsub.point", self.branch, at)

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        return super().note_move(position, point or BEGINNING)

    def move_to(self, point: Any, version: int) -> sql.Composed:
        return super().move_to(point or BEGINNING, version)

    def tables(self) -> sql.Composed:
        """Also includes tables whose branch is computed for each row. Needs the right to call ``revision.tracking()``."""
        query = sql.SQL("""
            select coalesce(jsonb_agg(jsonb_build_array(n.nspname, c.relname) order by n.nspname, c.relname), '[]')
            from revision.tracking() as t
            join pg_catalog.pg_class as c on c.oid = t.tbl
            join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
            where t.branch_id = {} or t.branch_id is null
        """)
        return query.format(self.branch)
