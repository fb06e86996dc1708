"""Rows in an Iceberg table are exactly once, whichever worker or server is killed between the files and the commit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psycopg
import pytest

from demo.duckdb_reader import ICEBERG, read
from demo.postgres import Cluster
from tests import rest_catalog, s3
from tests.chaos.crew import crew
from tests.chaos.harness import FULL, PROOF, SEED, insert
from tests.chaos.kills import until
from tests.chaos.lake_worker import ONE_LOOK, REMOTE_STEPS, ROWS, STEPS, TABLE, TWO_COMMITS, Worker
from tests.lakes import Lake
from tests.rest_catalog import RETRIED, Fault, RestCatalog

FAULTS = {*RETRIED} - {Fault.SILENT}
"""The faults of the catalog. A silent catalog would keep a worker for a minute, and has a test of its own."""
SECONDS = float(os.environ.get("SECONDS", "60" if FULL else "10"))
LARGER = pytest.mark.release(
    "every run has tests of a rollback and of another writer, in tests/integration/lake"
)
FREE_LOCKS = (
    "select pg_terminate_backend(l.pid) from pg_locks as l where l.locktype = 'advisory' and l.granted"
)
CRASH, OVERTAKEN = "crash of PostgreSQL", "overtaken by a retry"


def found(scan: str, location: str, extensions: Sequence[str], server: s3.Server | None) -> list[int]:
    """Return the ids in a table, as DuckDB reads them by the metadata file or the location."""
    secret = (
        "select 1"
        if server is None
        else (
            f"create secret (type s3, key_id '{s3.KEY}', secret '{s3.SECRET}', endpoint '127.0.0.1:{server.port}', "
            "region 'us-east-1', url_style 'path', use_ssl false)"
        )
    )
    rows = read(f"select id from {scan}(?)", location, extensions=extensions, setup=secret)
    return [id_ for (id_,) in rows]


@dataclass(frozen=True)
class Verdict:
    written: int
    lost: int
    twice: int


@dataclass
class Campaign:
    """A table, and processes that append to it while they are killed.

    ``rest`` is the catalog of a table outside of the database. ``server`` has the files of a table on S3. ``killed``
    counts the kills by step.
    """

    cluster: Cluster
    folder: Path
    fault: str = ""
    rest: RestCatalog | None = None
    server: s3.Server | None = None
    killed: Counter[str] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(f"{SEED} lake"))

    @property
    def steps(self) -> tuple[str, ...]:
        return STEPS if self.rest is None else REMOTE_STEPS

    @property
    def events(self) -> set[str]:
        """The events that must happen in each campaign."""
        return {*self.steps, CRASH, *([] if self.rest is None else [OVERTAKEN])}

    @property
    def is_complete(self) -> bool:
        """Whether all of these events have happened."""
        answered = self.rest is None or ({*self.rest.fired} == FAULTS and self.rest.conflicts > 0)
        return answered and self.killed.keys() >= self.events

    @cached_property
    def source(self) -> str:
        return self.cluster.conninfo()

    def new_table(self) -> None:
        if self.rest is not None:
            self.rest.catalog.create_table(TABLE, ROWS)
        elif self.server is not None:
            Lake(self.source, f"s3://{self.server.bucket()}/lake", self.server.settings).table(ROWS)
        else:
            Lake(self.source, self.folder / "lake").table(ROWS)

    @property
    def location(self) -> str:
        """The location of the table's metadata file."""
        if self.rest is not None:
            return self.rest.catalog.load_table(TABLE).metadata_location
        with psycopg.connect(self.source) as connection:
            query = "select metadata_location from iceberg_tables"
            return str(connection.execute(query).fetchall()[0][0])

    def run(self) -> Verdict:
        """Write and append changes, and kill workers. Return the verdict."""
        self.new_table()
        workers = [self.worker(number) for number in range(3)]
        with crew(self.source, self.folder, [worker.command() for worker in workers]) as started:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline or not self.is_complete:
                worker = self.next_at(self.chance.choice(self.steps), workers)
                process = started.freeze(worker.number)
                step = worker.step.read_text()
                worker.step.unlink()
                if step == "looked" and self.chance.random() < 0.5:
                    self.overtake(process)
                else:
                    self.killed[step] += 1
                    process.kill()
                    process.wait()
                    started.replace(worker.number)
                if self.chance.random() < 0.1:
                    self.cluster.stop("immediate")
                    self.cluster.start()
                    self.killed[CRASH] += 1
                if self.rest is not None and not self.rest.faults:
                    self.rest.faults.append(self.chance.choice(sorted(FAULTS, key=lambda fault: fault.name)))
                time.sleep(self.chance.random())
        while self.worker(99).process(self.chance):
            pass
        return self.judge()

    def next_at(self, step: str, workers: Sequence[Worker]) -> Worker:
        """Write until a worker is at this step, and return the worker.

        Until it is stopped, it may go on to later steps.
        """
        while True:
            insert(self.source, self.chance.randint(1, 5))
            for _ in range(100):
                for worker in workers:
                    if worker.step.exists() and worker.step.read_text() == step:
                        return worker
                time.sleep(0.005)

    def overtake(self, process: subprocess.Popen[bytes]) -> None:
        """Release the lock of a stopped process, and let it continue after another process has committed."""
        commits = self.commits()
        with psycopg.connect(self.source, autocommit=True) as connection:
            connection.execute(FREE_LOCKS)
        until(lambda: self.commits() > commits, "the commit of a retry")
        os.kill(process.pid, signal.SIGCONT)
        self.killed[OVERTAKEN] += 1

    def commits(self) -> int:
        """Return the number of commits of the table."""
        assert self.rest is not None
        return len(self.rest.commits)

    def ids(self) -> list[int]:
        """Return the ids in the table, read by a program that shares no code with the writer."""
        return found("iceberg_scan", self.location, ICEBERG, self.server)

    def worker(self, number: int) -> Worker:
        remote = self.rest is not None
        return Worker(number, self.source, str(self.folder), f"{SEED} {number}", remote, self.fault)

    def judge(self) -> Verdict:
        with psycopg.connect(self.source) as connection:
            written = {row[0] for row in connection.execute("select id from revision.commit").fetchall()}
        found = Counter(self.ids())
        print(f"\nseed {SEED}: killed: {dict(self.killed)}")
        return Verdict(len(written), len(written - found.keys()), found.total() - len(found))


@pytest.fixture
def rest(request, tmp_path, monkeypatch):
    """A REST catalog, with the files of its tables on S3 if the test says so."""
    store = request.getfixturevalue("s3_server") if getattr(request, "param", None) == "S3" else None
    with rest_catalog.running(tmp_path, monkeypatch, store) as rest:
        rest.delay = 0.1
        yield rest


def passed(campaign: Campaign) -> None:
    verdict = campaign.run()
    print(verdict)
    assert campaign.is_complete
    assert verdict.written > 10
    assert (verdict.lost, verdict.twice) == (0, 0)


@LARGER
@pytest.mark.timeout(900)
def test_kills_of_workers_and_servers_lose_and_double_no_row(new_cluster, tmp_path):
    """Takes a minute at a release: kills at each step of a commit."""
    passed(Campaign(new_cluster(), tmp_path))


@LARGER
@pytest.mark.timeout(900)
def test_kills_lose_and_double_no_row_on_s3(new_cluster, tmp_path, s3_server):
    """Takes a minute at a release: the same campaign, with the files on S3."""
    passed(Campaign(new_cluster(), tmp_path, server=s3_server))


@LARGER
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rest", ["local files", "S3"], indirect=True)
def test_kills_lose_and_double_no_row_of_another_catalog(new_cluster, tmp_path, rest):
    """Takes a minute at a release: workers are killed, or overtaken by a retry, before and after the catalog commits.

    The catalog sometimes gives a wrong answer or none.
    """
    passed(Campaign(new_cluster(), tmp_path, rest=rest, server=rest.store))
    print(
        f"{len(rest.commits)} commits, {rest.conflicts} conflicts, {Counter(fault.name for fault in rest.fired)}"
    )


@PROOF
def test_the_campaign_catches_a_pointer_that_moves_by_a_commit_of_its_own(new_cluster, tmp_path):
    """Takes seconds: processes are killed until a process was killed between both commits."""
    assert Campaign(new_cluster(), tmp_path, TWO_COMMITS).run().twice > 0


@PROOF
def test_the_campaign_catches_a_commit_that_is_repeated_without_another_look(new_cluster, tmp_path, rest):
    """Takes seconds: processes are killed and overtaken until both have happened at the right moments."""
    assert Campaign(new_cluster(), tmp_path, ONE_LOOK, rest).run().twice > 0
