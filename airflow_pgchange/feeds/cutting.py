"""A batch as queries, each for a run of its slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psycopg import sql

from airflow_pgchange.feeds.batch import Partition, Slice, grouped
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import Feed


def cut(
    feed: Feed, slices: Sequence[Slice], n: int, changes: Callable[[Slice], sql.Composed]
) -> list[Partition]:
    """At most ``n`` queries for the feed's columns that together return exactly the slices, in order.

    ``changes`` calls the SQL function that returns the changes of one slice.
    """
    columns = sql.SQL(", ").join(sql.Identifier(name) for name, _ in feed.columns)
    query = sql.SQL("select {} from {}")
    return [
        Partition(query.format(columns, changes(part)).as_string(None), part.count)
        for part in grouped(slices, n)
    ]


def refuse_shard(feed: Feed, shard: int | None) -> None:
    """Raise InvalidArgument where a feed without shards is asked for one."""
    if shard is not None:
        raise InvalidArgument(f"{feed.name}: {feed.kind} feeds have no shards: leave out shard={shard}")
