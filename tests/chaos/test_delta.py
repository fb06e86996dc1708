"""Rows in a Delta table are exactly once, whichever worker or server is killed, or overtaken by its retry."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from airflow_pgchange.lake import Delta
from airflow_pgchange.lake.delta import store
from demo.postgres import Cluster
from demo.spark import clean_environment
from tests.chaos.crew import crew
from tests.chaos.delta_worker import ONE_LOOK, ROWS, STEPS, DeltaWorker
from tests.chaos.harness import PROOF, SEED, insert
from tests.chaos.kills import until
from tests.chaos.test_lake import CERTIFICATES, CRASH, SECONDS, Verdict
from tests.deltas import made

LARGER = pytest.mark.release("every run has an attempt that its retry overtakes, in tests/integration/lake")
OVERTAKEN = "overtaken by its retry"
EVENTS = {*STEPS, CRASH, OVERTAKEN}
FREE_LOCKS = (
    "select pg_terminate_backend(l.pid) from pg_locks as l where l.locktype = 'advisory' and l.granted"
)
READER = ("duckdb==1.5.5", "duckdb-extension-delta==1.5.5")
"""A reader that shares no code with the writer, in an environment of its own."""
READING = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
import duckdb

connection = duckdb.connect()
(extension,) = Path(find_spec("duckdb_extension_delta").origin).parent.rglob("*.duckdb_extension")
connection.execute(f"load '{extension}'")
print(json.dumps(connection.execute("select id from delta_scan(?)", sys.argv[1:]).fetchall()))
"""


def read(lake: Delta) -> list[int]:
    """The ids in a table, as the other reader finds them."""
    uv = Path(sys.executable).parent / "uv"
    packages = [option for name in READER for option in ("--with", name)]
    settings = {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    reading = ["python", "-c", READING, lake.location]
    told = subprocess.run(
        [uv, "run", "--quiet", "--no-project", "--isolated", *packages, *reading],
        env={**clean_environment(), **settings},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [row[0] for row in json.loads(told.stdout)]


def one_at(step: str, workers: list[DeltaWorker]) -> DeltaWorker:
    """Wait for a process that is at this step. It may be at the next one when it is stopped."""
    found: list[DeltaWorker] = []

    def are_there() -> bool:
        found.extend(each for each in workers if each.is_at(step))
        return bool(found)

    until(are_there, f"a process that has {step}")
    return found[0]


def overtake(process: subprocess.Popen[bytes], source: str, lake: Delta) -> None:
    """Free the locks of a process that is stopped, and let it go on after another process has committed."""
    version = store.opened(lake).version()
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(FREE_LOCKS)
    until(lambda: store.opened(lake).version() > version, "the commit of a retry")
    os.kill(process.pid, signal.SIGCONT)


def run(cluster: Cluster, folder: Path, fault: str = "") -> tuple[Counter[str], Verdict]:
    """Write, append, kill and overtake; what has happened, and the verdict."""
    source, chance, happened = cluster.conninfo(), random.Random(f"{SEED} delta"), Counter[str]()

    def worker(number: int) -> DeltaWorker:
        return DeltaWorker(number, source, str(folder), f"{SEED} {number}", fault=fault)

    lake, workers = worker(0).target, [worker(number) for number in range(3)]
    made(lake.location, ROWS)
    with crew(source, folder, [each.command() for each in workers]) as started:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline or not happened.keys() >= EVENTS:
            insert(source, chance.randint(1, 5))
            stopped = one_at(chance.choice(STEPS), workers)
            process = started.freeze(stopped.number)
            step = stopped.step.read_text()
            stopped.step.unlink()
            if step == "looked" and chance.random() < 0.7:
                overtake(process, source, lake)
                happened[OVERTAKEN] += 1
            else:
                happened[step] += 1
                process.kill()
                process.wait()
                started.replace(stopped.number)
            if chance.random() < 0.1:
                cluster.stop("immediate")
                cluster.start()
                happened[CRASH] += 1
            time.sleep(chance.random())
    while worker(99).process(chance):
        pass
    with psycopg.connect(source) as connection:
        written = {row[0] for row in connection.execute("select id from revision.commit").fetchall()}
    found = Counter(read(lake))
    return happened, Verdict(len(written), len(written - found.keys()), found.total() - len(found))


@LARGER
@pytest.mark.timeout(900)
def test_kills_lose_and_double_no_row_of_a_delta_table(new_cluster, tmp_path):
    """A minute at a release: workers are killed, and overtaken by a retry, before and after the commit to the table."""
    happened, verdict = run(new_cluster(), tmp_path)
    print(f"\nseed {SEED}: {verdict}, {dict(happened)}")
    assert happened.keys() >= EVENTS
    assert verdict.written > 10
    assert (verdict.lost, verdict.twice) == (0, 0)


@PROOF
def test_the_campaign_catches_a_commit_to_a_delta_table_without_another_look(new_cluster, tmp_path):
    """Seconds: processes are killed, and overtaken, until each of that has happened."""
    _, verdict = run(new_cluster(), tmp_path, ONE_LOOK)
    assert verdict.twice > 0
