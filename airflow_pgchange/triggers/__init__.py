"""Triggers that wait for changes and for progress. All triggers of a process share one connection to each database."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.triggers.feed import FeedTrigger, PointTrigger, ReplyTrigger
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "feed": ["FeedTrigger", "PointTrigger", "ReplyTrigger"],
        },
    )

__all__ = [
    "FeedTrigger",
    "PointTrigger",
    "ReplyTrigger",
]
