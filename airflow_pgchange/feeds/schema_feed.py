"""Base classes of feeds, whose queries call the functions of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, Self

from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.batch import Batch, Slice
from airflow_pgchange.feeds.consumer_names import Names
from airflow_pgchange.feeds.feed import BEGINNING, Ask, Goal, Position, Token
from airflow_pgchange.feeds.feed_kinds import identity
from airflow_pgchange.feeds.queries import call, select
from airflow_pgchange.feeds.start_position import Start, check_start


class SchemaFeed:
    """A feed whose queries call the functions of a schema.

    A subclass is a frozen dataclass, whose fields name the consumer. It sets the other class variables. Its progress is
    kept with the changes, unless it sets ``progress``.
    """

    kind: ClassVar[str]
    schema: ClassVar[str]
    progress: ClassVar[Literal["results", "source"]] = "source"
    covers: ClassVar[str | None] = None
    schema_version: ClassVar[int] = 1
    sharded: ClassVar[bool] = False
    names: ClassVar[Names]
    sql_words: ClassVar[Mapping[str, str]] = {}
    """The fields that have another name in SQL, by that name."""

    @classmethod
    def of_status(cls, feed: Mapping[str, Any]) -> Self:
        return cls(**{cls.sql_words.get(word, word): value for word, value in feed.items()})

    @classmethod
    def named(cls, ask: Ask, *parts: str) -> Self:
        return cls(*parts)

    @property
    def name(self) -> str:
        return self.names.of(*self.parts)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts of the consumer's name, which are also the first arguments of the functions."""
        return tuple(identity(self).values())

    def register(self) -> sql.Composed:
        return self._select("register")

    def lock(self) -> sql.Composed:
        return self._select("take_lock")

    def locked(self) -> sql.Composed:
        return self._select("locked")

    def position(self) -> sql.Composed:
        return self._select("position")

    def choose(self, position: Position, limit: int) -> sql.Composed | None:
        return None

    def claim(
        self,
        position: Position,
        limit: int,
        choice: Mapping[str, Any] | None,
        max_attempts: int | None,
        *,
        split: bool = False,
    ) -> sql.Composed:
        on_give_up = "bisect" if split else None
        return self._select("claim", position, limit, *self._claim_options(choice), max_attempts, on_give_up)

    def _claim_options(self, choice: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """Return the arguments that a claim has in this schema alone."""
        return ()

    def leased(self, claim: sql.Composed, owner: str, lease: Seconds) -> sql.Composed:
        return self._lease(sql.SQL("({})").format(claim), owner, lease)

    def renew(self, token: Token, lease: Seconds) -> sql.Composed:
        return self._lease(sql.Literal(Jsonb(token)), None, lease)

    def _lease(self, batch: sql.Composable, owner: str | None, lease: Seconds) -> sql.Composed:
        query = sql.SQL("select {}({}, {}, {}, pg_catalog.make_interval(secs => {}))")
        function = sql.Identifier(self.schema, "lease")
        consumer = sql.SQL(", ").join(map(sql.Literal, self.parts))
        return query.format(function, consumer, batch, owner, seconds("lease", lease))

    def end_lease(self, token: Token) -> sql.Composed:
        return self._select("end_lease", token)

    def end_leases(self, owner: str | None = None) -> sql.Composed:
        return self._select("end_leases", owner)

    def resume(self, position: Position, token: Token) -> sql.Composed:
        return self._select("resume", position, token)

    def outcome(self, token: Token) -> sql.Composed:
        return self._select("outcome", token)

    def ack(self, batch: Batch) -> sql.Composed:
        return self._select("ack", batch.to_json())

    def in_work(self, position: Position) -> sql.Composed:
        return self._select("in_work", position)

    def note_failure(self, batch: Batch, error: str, of_batch: bool | None = None) -> sql.Composed:
        return self._select("note_failure", batch.to_json(), error, of_batch)

    def skip(self, row: Mapping[str, Any], reason: str) -> sql.Composed:
        return self._select("skip", row, reason)

    def _select(self, function: str, *arguments: Any) -> sql.Composed:
        """Return the call of a function of the schema with the consumer as its first arguments."""
        return select(f"{self.schema}.{function}", *self.parts, *arguments)


@dataclass(frozen=True)
class OfferedFeed(SchemaFeed):
    """A feed whose schema has the trait ``position``: ``pgchange.offer`` gives it the functions that this class calls.

    The schema itself writes ``register``, ``position``, ``lag``, ``changes``, ``point`` and ``passed``. The progress of a
    consumer is kept with the results.

    ``start`` is where a new consumer starts. It acts once, when the consumer is registered. Two feeds that differ in it
    alone are equal, and have the same name and the same asset.
    """

    progress: ClassVar[Literal["results", "source"]] = "results"

    start: Start = field(default=BEGINNING, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_start(self.start)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return select(f"{self.schema}.lag", position, upto)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call(f"{self.schema}.changes", Jsonb(part.after), Jsonb(part.upto))

    def point(self) -> sql.Composed:
        return select(f"{self.schema}.point")

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        return select(f"{self.schema}.passed", position, goal)

    def mark(self) -> sql.Composed:
        return self._select("mark")

    def adopt_mark(self, mark: Mapping[str, Any] | None) -> sql.Composed:
        return self._select("adopt_mark", mark)

    def point_at(self, at: datetime | str | None) -> sql.Composed:
        if at is not None:
            raise InvalidArgument(f"{self.name} can move to beginning or now, not to {at}: it has no times")
        return self.point()

    def note_move(self, position: Position, point: Any) -> sql.Composed:
        return self._select("note_move", position, point)

    def move_to(self, point: Any, version: int) -> sql.Composed:
        return self._select("move_consumer", point, version)

    def consumer_names(self) -> sql.Composed:
        return select(f"{self.schema}.consumer_names")

    def note_start(self, position: Position, point: Any) -> sql.Composed:
        return self._select("note_start", position, point)

    def start_at(self, point: Any, version: int) -> sql.Composed:
        return self._select("start_at", point, version)

    def known(self) -> sql.Composed:
        return self._select("is_known")

    def forget(self) -> sql.Composed:
        return self._select("drop_consumer")
