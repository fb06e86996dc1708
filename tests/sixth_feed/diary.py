"""The lines of a diary as a feed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from airflow_pgchange.feeds.batch import Change
from airflow_pgchange.feeds.consumer_names import Names
from airflow_pgchange.feeds.feed_kinds import kind_of_feed
from airflow_pgchange.feeds.schema_feed import OfferedFeed


@kind_of_feed
@dataclass(frozen=True)
class DiaryFeed(OfferedFeed):
    """Every line of the diary, exactly once for each reader and in the order of writing."""

    kind: ClassVar[str] = "diary"
    schema: ClassVar[str] = "diary"
    names: ClassVar[Names] = Names("diary:{}", (".+",), "diary:ann")
    columns: ClassVar[tuple[tuple[str, str], ...]] = (
        ("number", "bigint"),
        ("words", "text"),
        ("written_at", "timestamptz"),
    )

    reader: str

    def change(self, row: Mapping[str, Any]) -> Change:
        number = row["number"]
        return Change(
            id=number, position=str(number), created_at=row["written_at"], data={"words": row["words"]}
        )
