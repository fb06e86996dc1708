"""Conditions of a cluster. Triggers and sensors wait for them as for feeds: a condition that holds counts as ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from psycopg import sql

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.feed import Position
from airflow_pgchange.feeds.feed_kinds import kind_of_feed

LACKING: Mapping[str, str] = {
    "every replicaset has a master": """
        select from topology._pico_replicaset as r where not exists (
            select from topology._pico_instance as i
            where i.name = r.current_master_name and i.current_state ->> 0 = 'Online')
    """,
    "every instance is online": """
        select from topology._pico_instance as i where i.current_state ->> 0 = 'Offline'
    """,
    "every bucket is active": """
        select from topology._pico_bucket as b where b.state <> 'active'
    """,
}
"""For each condition, the query that returns the objects that violate it. An offline master does not count as a
master."""


@kind_of_feed
@dataclass(frozen=True)
class TopologyCondition:
    """A condition of a cluster, one of ``LACKING``, which is evaluated in its catalogue.

    In its lag, ``ready`` is 1 while the condition holds, and ``waiting`` counts the objects that violate it. The
    condition held at one moment, and may not hold any more when a wait for it ends. Raises InvalidArgument for another
    condition.
    """

    kind: ClassVar[str] = "topology_condition"
    progress: ClassVar[Literal["results", "source"]] = "source"
    covers: ClassVar[str | None] = None

    condition: str

    def __post_init__(self) -> None:
        if self.condition not in LACKING:
            raise InvalidArgument(
                f"{self.condition!r} is not a condition of a cluster: it must be one of {', '.join(map(repr, LACKING))}"
            )

    @property
    def name(self) -> str:
        return f"topology: {self.condition}"

    def position(self) -> sql.Composed:
        return sql.SQL("select {}").format(None)

    def lag(self, position: Position, upto: int) -> sql.Composed:
        query = (
            "select json_build_object('ready', (count(*) = 0)::int, 'waiting', count(*)) from ({}) as lacking"
        )
        return sql.SQL(query).format(sql.SQL(LACKING[self.condition]))

    def locked(self) -> sql.Composed:
        return sql.SQL("select {}").format(False)
