"""Writers that roll back, commit late or crash, consumers that fail, and a ledger that shows whether each commit was
processed exactly once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg
import pytest

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds import Change, CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.keys import text

FULL = os.environ.get("CHAOS") == "full"
FEED = CommitFeed("chaos", 0)
SEED = int(os.environ.get("SEED", "20130101"))
PROOF = pytest.mark.release(
    "a harness is proved when it changes and at a release; every run has its campaign"
)
"""Marks tests that plant a fault, to check that a campaign detects it."""
Each = TypeVar("Each")


@dataclass(frozen=True)
class Campaign:
    """The size and the duration of a campaign.

    Times are in seconds. ``table`` is the table whose rows become the commits.
    """

    writers: int = 16
    seconds: float = 60 if FULL else 3
    delay: float = 2.0 if FULL else 0.5
    rollbacks: float = 0.2
    failures: float = 0.1
    consumers: int = 3
    seed: int = SEED
    table: str = "revision.commit"


class ConsumerFailed(Exception):
    """Raised by a consumer before a tenth of its acks."""


def prepare_results(results: str) -> None:
    """The table that consumers write to: a row for each commit, in the order in which they were processed."""
    with psycopg.connect(results, autocommit=True) as connection:
        connection.execute(
            "create table processed (n bigint generated always as identity, commit_id bigint, key text)"
        )


def write(source: str, campaign: Campaign, number: int, deadline: float) -> None:
    """Run one writer. Its transactions have a few commits; some are slow, have savepoints, are rolled back or
    prepared."""
    chance = random.Random(f"{campaign.seed} writer {number}")
    with psycopg.connect(source, autocommit=True) as connection:
        while time.monotonic() < deadline:
            write_some(connection, campaign, chance)


def write_some(connection: psycopg.Connection[Any], campaign: Campaign, chance: random.Random) -> None:
    """Write one transaction of a few commits."""
    connection.execute("begin")
    connection.execute(
        f"insert into {campaign.table} select from generate_series(1, %s)", [chance.randint(1, 20)]
    )
    if chance.random() < 0.3:
        connection.execute("savepoint s")
        connection.execute(f"insert into {campaign.table} default values")
        if chance.random() < 0.5:
            connection.execute("rollback to s")
    if chance.random() < 0.3:
        time.sleep(chance.random() * campaign.delay)
    if chance.random() < campaign.rollbacks:
        connection.execute("rollback")
    elif chance.random() < 0.1:
        commit_in_two_phases(connection, chance, campaign.delay)
    else:
        connection.execute("commit")


def commit_in_two_phases(connection: psycopg.Connection[Any], chance: random.Random, delay: float) -> None:
    """Prepare the transaction, wait up to ``delay`` seconds, and commit it. Its name begins with this process's id."""
    name = f"{os.getpid()} {connection.info.dbname} {chance.random()}"
    connection.execute(f"prepare transaction '{name}'")
    time.sleep(chance.random() * delay)
    connection.execute(f"commit prepared '{name}'")


def harmed(changes: Sequence[Each], fault: str) -> list[Each]:
    """Return the changes that a consumer with a planted fault processes: it ``skips`` the first change, or
    ``doubles`` it."""
    return [*changes[fault == "skips" :], *changes[: fault == "doubles"]]


def keep_commits(connection: psycopg.Connection[Any], changes: Sequence[Change]) -> None:
    ids = [change.id if isinstance(change.id, int) else None for change in changes]
    keys = [None if isinstance(change.id, int) else text(change.id) for change in changes]
    connection.execute(
        "insert into processed (commit_id, key) select * from unnest(%s::bigint[], %s::text[])", [ids, keys]
    )


def consume_once(
    feed: Feed,
    results: str,
    source: str,
    limit: int,
    fail: Callable[[], bool] = lambda: False,
    keep: Callable[[psycopg.Connection[Any], Sequence[Change]], None] = keep_commits,
) -> int:
    """Process one batch in the consumer transaction, write its results with ``keep``, and return the number of
    changes."""
    with ConsumerTransaction(feed, results, source) as consumer:
        if consumer.busy or consumer.claim(limit) is None:
            return 0
        changes = list(consumer.changes())
        if fail():
            raise ConsumerFailed
        consumer.ack(lambda connection: keep(connection, changes))
        return len(changes)


@dataclass
class Consumers:
    """Consumers that compete for one feed, and sometimes fail.

    Each batch is read from a random server of the source.
    """

    feed: CommitFeed
    results: str
    sources: Sequence[str]
    campaign: Campaign
    failed: int = 0
    errors: list[BaseException] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        chance = random.Random(f"{self.campaign.seed} consumer {number}")
        while not self.stopping.is_set():
            try:
                done = consume_once(
                    self.feed,
                    self.results,
                    chance.choice(self.sources),
                    chance.choice([1, 7, 50, 1000]),
                    # The first batch always fails, so that a short campaign has a failure, too.
                    lambda: not self.failed or chance.random() < self.campaign.failures,
                )
            except ConsumerFailed:
                self.failed += 1
                continue
            except (PgChangeError, psycopg.Error) as error:
                self.errors.append(error)
                return
            if not done:
                self.stopping.wait(0.02)


def run(
    feed: CommitFeed,
    results: str,
    sources: Sequence[str],
    campaign: Campaign,
    beside: Callable[[], None] = lambda: None,
) -> Consumers:
    """Write and consume at once; ``sources[0]`` takes the writes. Returns when everything written has been drained.

    ``beside`` is called while writers write.
    """
    prepare_results(results)
    consumers = Consumers(feed, results, sources, campaign)
    deadline = time.monotonic() + campaign.seconds
    writing = [
        threading.Thread(target=write, args=(sources[0], campaign, n, deadline))
        for n in range(campaign.writers)
    ]
    reading = [threading.Thread(target=consumers.run, args=(n,)) for n in range(campaign.consumers)]
    for thread in writing + reading:
        thread.start()
    beside()
    for thread in writing:
        thread.join()
    consumers.stopping.set()
    for thread in reading:
        thread.join()
    while consume_once(feed, results, sources[0], 100_000):
        pass
    return consumers


@dataclass(frozen=True)
class Verdict:
    written: int
    lost: int
    doubled: int
    in_order: bool


def judge(results: str, source: str, written: str = "select id::text from revision.commit") -> Verdict:
    """Compare the processed commits with the ledger of the source.

    ``written`` returns the text of every commit in the source.
    """
    known = "select coalesce(key, commit_id::text) from"
    with psycopg.connect(source) as connection:
        queue = connection.execute(f"{known} revision.commit_queue order by txid, id").fetchall()
        ledger = {row[0] for row in connection.execute(written).fetchall()}
    with psycopg.connect(results) as connection:
        got = [row[0] for row in connection.execute(f"{known} processed order by n").fetchall()]
    counts = Counter(got)
    return Verdict(
        written=len(ledger),
        lost=sum(1 for commit in ledger if commit not in counts),
        doubled=sum(n - 1 for n in counts.values()),
        in_order=got == [row[0] for row in queue],
    )


def drain(results: str, source: str) -> None:
    """Process everything that is ready."""
    while consume_once(FEED, results, source, 1000):
        pass


def one(conninfo: str, query: str, *parameters: Any) -> Any:
    """Return the value of a query on a new connection."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        row = connection.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def insert(source: str, n: int) -> list[int]:
    """Write commits of the trunk, one in each transaction, and return their ids."""
    with psycopg.connect(source, autocommit=True) as connection:
        rows = [
            connection.execute("insert into revision.commit default values returning id").fetchone()
            for _ in range(n)
        ]
    return [row[0] for row in rows]


def next_xid(source: str) -> int:
    """Return the next transaction id."""
    with psycopg.connect(source, autocommit=True) as connection:
        return connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()[
            0
        ]


def processed(results: str) -> list[int]:
    """Return the commits in the order in which they were processed."""
    with psycopg.connect(results) as connection:
        return [row[0] for row in connection.execute("select commit_id from processed order by n").fetchall()]
