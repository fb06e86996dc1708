"""The feed of a cluster's topology: the changes of its catalogue, in the order of commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import is_name
from airflow_pgchange.feeds.batch import Change
from airflow_pgchange.feeds.consumer_names import TEXT, Names
from airflow_pgchange.feeds.feed_kinds import kind_of_feed
from airflow_pgchange.feeds.schema_feed import OfferedFeed
from airflow_pgchange.feeds.schemas import our_schema

our_schema("topology")


@kind_of_feed
@dataclass(frozen=True)
class TopologyFeed(OfferedFeed):
    """The events of a catalogue after a consumer's (term, index), exactly once per consumer and in order.

    A change's ``id`` is ``term/index``, its ``data`` the event: ``op``, ``map`` and what changed. Raises
    InvalidArgument for an empty name.
    """

    kind: ClassVar[str] = "topology"
    schema: ClassVar[str] = "topology"
    names: ClassVar[Names] = Names("topology:{}", (TEXT,), "topology:watcher")
    sql_words: ClassVar[Mapping[str, str]] = {"consumer_id": "consumer"}
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("id", "text"),
        ("term", "bigint"),
        ("index", "bigint"),
        ("event", "jsonb"),
        ("written_at", "timestamptz"),
    )

    consumer: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_name(self.consumer):
            raise InvalidArgument("consumer must be a text that is not empty")

    def change(self, row: Mapping[str, Any]) -> Change:
        return Change(id=row["id"], position=row["id"], created_at=row["written_at"], data=row["event"])
