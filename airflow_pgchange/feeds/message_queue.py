"""The feed of message queues: each message goes to one worker of a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import is_name
from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.consumer_names import TEXT, WORD, Names
from airflow_pgchange.feeds.feed import Goal, Position
from airflow_pgchange.feeds.feed_kinds import kind_of_feed
from airflow_pgchange.feeds.queries import call, select
from airflow_pgchange.feeds.schema_feed import SchemaFeed
from airflow_pgchange.feeds.schemas import our_schema

our_schema("mbus", extension="hstore")


@kind_of_feed
@dataclass(frozen=True)
class QueueFeed(SchemaFeed):
    """The messages that one consumer of a queue receives. Their order is not defined, except by ``consume_after``.

    Up to 64 workers of one consumer may have batches at once. Messages in a batch are skipped by the other workers and by
    consumers in SQL; ``mbus.take`` waits for them. A retry gets the same batch, or a part of it, unless a message of it
    was taken in the meantime. Exactly once for results in the queue's database, at least once elsewhere.

    A change's ``id`` is the message's iid. Its ``data`` has ``data``, ``properties`` and ``headers``, which are JSON
    objects of texts or nulls, like an hstore. Raises InvalidArgument for an empty name.
    """

    kind: ClassVar[str] = "queue"
    schema: ClassVar[str] = "mbus"
    sql_words: ClassVar[Mapping[str, str]] = {"queue": "queue_name"}
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "text"),
        ("number", "bigint"),
        ("data", "jsonb"),
        ("properties", "jsonb"),
        ("headers", "jsonb"),
        ("added", "timestamptz"),
    )
    names: ClassVar[Names] = Names(
        "queue:{}/{}",
        (TEXT, WORD),
        "queue:orders/default",
        "`airflow-pgchange skip` gives up its batch, mbus.drop_consumer() removes it",
    )

    queue_name: str
    consumer: str = "default"
    start: InitVar[object] = None

    def __post_init__(self, start: object) -> None:
        if start is not None:
            raise InvalidArgument(
                "the consumer of a queue has no start: it begins with the messages that are in the queue when the "
                "consumer is made"
            )
        for name, noun in (("queue_name", "queue"), ("consumer", "consumer")):
            value = getattr(self, name)
            if not is_name(value):
                raise InvalidArgument(f"{name} must be the name of a {noun}, not {value!r}")

    def register(self) -> sql.Composed:
        # A consumer is created with its queue, or by the queue's owner, so its position exists already.
        return self.position()

    def lag(self, position: Position, upto: int) -> sql.Composed:
        return self._select("lag", upto)

    def changes(self, batch: Batch, part: Slice) -> sql.Composed:
        return call("mbus.changes", *self.parts, batch.bounds, part.after, part.upto)

    def change(self, row: Mapping[str, Any]) -> Change:
        data = {name: row[name] for name in ("data", "properties", "headers")}
        return Change(id=row["id"], position=str(row["number"]), created_at=row["added"], data=data)

    def point(self) -> sql.Composed:
        return select("mbus.point", self.queue_name)

    def passed(self, position: Position, goal: Goal) -> sql.Composed:
        return self._select("passed", goal)
