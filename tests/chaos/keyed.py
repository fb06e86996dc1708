"""A table whose key is not a number. Writers that roll back or crash insert rows while its old rows are backfilled."""

from __future__ import annotations

import psycopg

from airflow_pgchange.feeds import CommitFeed
from tests.chaos.harness import Campaign, Consumers, Verdict, judge, run

SHAPES = {
    "uuid": ("id uuid default gen_random_uuid() primary key", "id::text"),
    "text": ("id text default gen_random_uuid() primary key", "id"),
    "pair": (
        "tenant uuid default gen_random_uuid(), no int default 7, primary key (tenant, no)) partition by hash (tenant",
        "array[tenant::text, no::text]::text",
    ),
}
"""By shape of key: the columns of a table whose rows get their keys by defaults, and SQL for the text of a key."""
PARTS = """
create table item_0 partition of item for values with (modulus 2, remainder 0);
create table item_1 partition of item for values with (modulus 2, remainder 1);
"""
BEFORE = 300


def campaign_of(shape: str, source: str, ordered: bool) -> Consumers:
    """A campaign on a tracked table with a key of this shape. The results are in the source's database."""
    columns, _ = SHAPES[shape]
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(f"create table item ({columns})")
        if shape == "pair":
            connection.execute(PARTS)
        connection.execute(f"insert into item select from generate_series(1, {BEFORE})")
        tracked = connection.execute("select revision.track('item')").fetchone()
    assert tracked is not None

    def enqueue() -> None:
        with psycopg.connect(source, autocommit=True) as connection:
            connection.execute("call revision.enqueue_existing('item', 20)")

    feed = CommitFeed("chaos", tracked[0], in_order=ordered)
    return run(feed, source, [source], Campaign(table="item"), beside=enqueue)


def verdict_of(shape: str, source: str) -> Verdict:
    return judge(source, source, f"select {SHAPES[shape][1]} from item")
