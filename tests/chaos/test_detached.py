"""Detached batches are exactly once, whichever claimer, job, acker or server is killed, and however late an ack comes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

from airflow_pgchange import detached
from airflow_pgchange.errors import Leased
from airflow_pgchange.feeds.feed_kinds import to_json
from demo.postgres import Cluster
from tests.chaos.crew import WORK, crew
from tests.chaos.detached_worker import ANOTHER, LEASES, NO_TOKEN, OVER, Files, Member, Worker
from tests.chaos.event_worker import through_faults
from tests.chaos.faults import NAME, WAITED, Faults
from tests.chaos.harness import FULL, PROOF, SEED
from tests.chaos.kills import until
from tests.chaos.mixed_verdict import Count, compared
from tests.chaos.test_poison import KINDS, Kind

SECONDS = float(os.environ.get("SECONDS", "60" if FULL else "10"))
"""Seconds during which faults happen to each feed."""
LEDGER = "create table public.ledger (id text primary key)"
RESULT = "create table public.result (n bigint generated always as identity, id text not null)"
NOTED = (
    "ack",
    "claim refused, because the batch is leased",
    "claim of a batch whose lease ended",
    "second job on a batch",
    "job that renews its lease",
    "job that outlives its lease",
    "job that came too late",
    "release of a batch whose job failed",
    "lease that ended between read and ack",
    "lease that ended in the merge",
    "late ack that was refused",
    "ack of what was acked before",
    "second ack, which writes nothing",
)
"""Events that must happen in a whole campaign. The processes record each of them."""
NOTED_IN_EVERY_RUN = (
    "ack",
    "claim of a batch whose lease ended",
    "second job on a batch",
    "lease that ended between read and ack",
    "late ack that was refused",
    "second ack, which writes nothing",
)
"""Events that must happen in the short campaign."""
NOT_HERE = {"number of workers changed", WAITED}
"""Events that do not happen here. The campaign over all feeds has them."""
KILLS = ("kill at step claimed", "kill at step read", "kill at step committed")
"""The faults of the short campaign: one kill for each role."""
EVERY_RUN = "commit"
"""The kind of feed whose campaign every run has. Claims of events and of the topology have the same implementation."""
LARGER = pytest.mark.release(
    "every run has a short campaign of commits, and test_detached.py has tests of each feed"
)


@dataclass
class DetachedFaults(Faults):
    """The faults of a whole campaign, or only some kinds of them."""

    database: str = ""
    only: Sequence[str] = ()

    @property
    def source(self) -> str:
        return make_conninfo(self.database, application_name=NAME)

    @property
    def kinds(self) -> Mapping[str, tuple[float, Callable[[], None]]]:
        every = super().kinds
        return {name: kind for name, kind in every.items() if name in (self.only or every.keys() - NOT_HERE)}


@dataclass(frozen=True)
class Campaign:
    """A campaign for one kind of feed. ``claimers``, ``jobs`` and ``ackers`` are the numbers of processes."""

    kind: Kind
    source: str
    results: str
    folder: Path
    claimers: int = 1
    jobs: int = 1
    ackers: int = 1
    noted: Sequence[str] = NOTED
    fault: str = ""

    def set_up(self) -> None:
        with psycopg.connect(self.source, autocommit=True) as connection:
            connection.execute(WORK + LEDGER)
            self.kind.make(connection)
        with psycopg.connect(self.results, autocommit=True) as connection:
            connection.execute(RESULT)

    def member(self, role: str, number: int = 0) -> Member:
        feed = to_json(self.kind.feed)
        return Member(role, number, feed, self.source, self.results, str(self.folder), f"{SEED}", self.fault)

    @property
    def members(self) -> list[Member]:
        counts = {"claimer": self.claimers, "job": self.jobs, "acker": self.ackers}
        return [self.member(role, number) for role, count in counts.items() for number in range(count)]

    @property
    def files(self) -> Files:
        return Files(self.folder)

    @property
    def missing(self) -> list[str]:
        """Return the expected events that have not happened.

        The workers of a queue share one consumer, so no lease refuses their claims.
        """
        noted = self.files.noted()
        return [
            what
            for what in self.noted
            if not noted[what] and not (self.kind.feed.kind == "queue" and "claim refused" in what)
        ]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write a few changes at a time, each with a row in the ledger, until the block ends."""
        chance, done = random.Random(f"{SEED} writer"), threading.Event()

        def work() -> None:
            with psycopg.connect(self.source, autocommit=True) as connection:
                while not done.wait(0.3):
                    with connection.transaction():
                        ids = self.kind.write(connection, chance.choice([1, 3, 20]))
                        connection.cursor().executemany(
                            "insert into public.ledger values (%s)", [[str(one)] for one in ids]
                        )

        also = (errors.DeadlockDetected, errors.LockNotAvailable)
        thread = threading.Thread(target=through_faults, args=(work, done.is_set, also))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def run(self, faults: Callable[..., DetachedFaults], seconds: float) -> DetachedFaults:
        """Let faults happen, and then wait until all other expected events have happened, too."""
        self.set_up()
        members = self.members
        with self.writing(), crew(self.source, self.folder, [one.command for one in members]) as started:
            happened = faults({"all": started}, {"all": members}, random.Random(f"{SEED} faults"))
            happened.rage(seconds, pause=0.5)
            until(lambda: not self.missing, "everything to happen")
            started.stop()
        return happened

    def drain(self) -> None:
        """Process the rest of the changes.

        The processes have ended, and their late acks must have been refused or committed.
        """
        acker = Worker(replace(self.member("acker", 99), fault=""))
        empty = 0
        while empty < 2:
            try:
                handle = detached.claim(
                    self.kind.feed, self.results, self.source, lease=600, owner="", busy_timeout=60
                )
            except Leased:
                time.sleep(OVER)
                continue
            if handle is None:
                # A queue's lag does not count leased messages.
                empty += 1
                time.sleep(max(LEASES) + OVER if self.kind.feed.kind == "queue" else 0)
                continue
            batch = detached.batch_of(handle, self.results, self.source)
            acker.finish(handle, acker._ids_of(batch))
        while self.files.of("read"):
            acker.ack()

    def judge(self) -> Count:
        with psycopg.connect(self.source) as connection:
            ledger = connection.execute("select id from public.ledger").fetchall()
        with psycopg.connect(self.results) as connection:
            processed = connection.execute("select id from public.result").fetchall()
        return compared(ledger, processed)


def show(name: str, campaign: Campaign, fired: DetachedFaults, found: Count) -> None:
    """Print the figures of a campaign, for runs with ``-s``."""
    print(f"\n{name}, seed {SEED}: {found}")
    for line in sorted((fired.fired + campaign.files.noted()).items()):
        print(*line)


def test_kills_and_late_acks_lose_and_double_nothing(cluster: Cluster, db: str, tmp_path: Path) -> None:
    """Takes seconds: processes start in place of those that are killed, and leases have to end."""
    campaign = Campaign(KINDS[EVERY_RUN], db, db, tmp_path, noted=NOTED_IN_EVERY_RUN)
    fired = campaign.run(partial(DetachedFaults, cluster, database=db, only=KILLS), 0)
    campaign.drain()
    found = campaign.judge()
    show(EVERY_RUN, campaign, fired, found)
    assert fired.missing == []
    assert found.is_right


def _cases() -> Iterator[Any]:
    for name, kind in KINDS.items():
        marks = [pytest.mark.hstore] if kind.feed.kind == "queue" else []
        for apart in (False, True) if kind.feed.progress == "results" else (False,):
            yield pytest.param(name, apart, marks=marks, id=f"{name}{', elsewhere' if apart else ''}")


@LARGER
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "apart"), [*_cases()])
def test_servers_that_crash_too(
    new_cluster: Callable[..., Cluster], name: str, apart: bool, tmp_path: Path
) -> None:
    """Takes a minute for each feed."""
    cluster = new_cluster()
    source = results = cluster.conninfo()
    if apart:
        with psycopg.connect(cluster.conninfo("template1"), autocommit=True) as connection:
            connection.execute("create database results template postgres")
        results = cluster.conninfo("results")
    campaign = Campaign(KINDS[name], source, results, tmp_path, claimers=2, jobs=3, ackers=2)
    fired = campaign.run(partial(DetachedFaults, cluster, database=source), SECONDS)
    campaign.drain()
    found = campaign.judge()
    show(name, campaign, fired, found)
    assert fired.missing == []
    assert found.is_right


@PROOF
def test_the_campaign_catches_an_ack_that_ignores_the_token(
    cluster: Cluster, db: str, tmp_path: Path
) -> None:
    """Takes seconds: a lease has to end, and the next batch has to be in work."""
    campaign = Campaign(KINDS[EVERY_RUN], db, db, tmp_path, jobs=2, fault=NO_TOKEN)
    campaign.set_up()
    with campaign.writing(), crew(db, tmp_path, [one.command for one in campaign.members]) as started:
        until(lambda: campaign.files.noted()[ANOTHER] > 1, ANOTHER)
        started.stop()
    campaign.drain()
    found = campaign.judge()
    assert found.lost + found.twice > 0
