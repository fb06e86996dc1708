"""Rows in an Iceberg table are exactly once, whichever worker or server is killed between the files and the commit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from demo.postgres import Cluster
from demo.spark import clean_environment
from tests.chaos.crew import crew
from tests.chaos.harness import FULL, PROOF, SEED, insert
from tests.chaos.kills import until
from tests.chaos.lake_worker import ROWS, STEPS, TWO_COMMITS, Worker
from tests.lakes import Lake

SECONDS = float(os.environ.get("SECONDS", "60" if FULL else "10"))
LARGER = pytest.mark.release(
    "every run has tests of a rollback and of another writer, in tests/integration/lake"
)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CRASH = "crash of PostgreSQL"
READER = ("duckdb==1.5.5", "duckdb-extension-avro==1.5.5", "duckdb-extension-iceberg==1.5.5")
"""A reader that shares no code with the writer, in an environment of its own."""
READING = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
import duckdb

connection = duckdb.connect()
for name in ("avro", "iceberg"):
    folder = Path(find_spec(f"duckdb_extension_{name}").origin).parent
    (extension,) = folder.rglob("*.duckdb_extension")
    connection.execute(f"load '{extension}'")
print(json.dumps(connection.execute("select id from iceberg_scan(?)", sys.argv[1:]).fetchall()))
"""


def read(location: str) -> list[int]:
    """The ids in a table, as the other reader finds them by its metadata file."""
    uv = Path(sys.executable).parent / "uv"
    packages = [option for name in READER for option in ("--with", name)]
    settings = {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    told = subprocess.run(
        [uv, "run", "--quiet", "--no-project", "--isolated", *packages, "python", "-c", READING, location],
        env={**clean_environment(), **settings},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [row[0] for row in json.loads(told.stdout)]


@dataclass(frozen=True)
class Verdict:
    written: int
    lost: int
    twice: int


def judge(source: str) -> Verdict:
    with psycopg.connect(source) as connection:
        written = {row[0] for row in connection.execute("select id from revision.commit").fetchall()}
        ((location,),) = connection.execute("select metadata_location from iceberg_tables").fetchall()
    found = Counter(read(location))
    return Verdict(len(written), len(written - found.keys()), found.total() - len(found))


def run(cluster: Cluster, folder: Path, fault: str = "") -> tuple[Counter[str], Verdict]:
    """Write, append and kill; what was killed, by its step, and the verdict."""
    source, chance, killed = cluster.conninfo(), random.Random(f"{SEED} lake"), Counter[str]()
    Lake(source, folder / "lake").table(ROWS)
    workers = [Worker(number, source, str(folder), f"{SEED} {number}", fault) for number in range(3)]
    with crew(source, folder, [worker.command() for worker in workers]) as started:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline or not killed.keys() >= {*STEPS, CRASH}:
            insert(source, chance.randint(1, 5))
            until(lambda: any(worker.step.exists() for worker in workers), "a batch")
            worker = chance.choice([worker for worker in workers if worker.step.exists()])
            process = started.freeze(worker.number)
            killed[worker.step.read_text()] += 1
            worker.step.unlink()
            process.kill()
            process.wait()
            started.replace(worker.number)
            if chance.random() < 0.1:
                cluster.stop("immediate")
                cluster.start()
                killed[CRASH] += 1
            time.sleep(chance.random())
    last = Worker(99, source, str(folder), "last")
    while last.process(chance):
        pass
    return killed, judge(source)


@LARGER
@pytest.mark.timeout(900)
def test_kills_of_workers_and_servers_lose_and_double_no_row(new_cluster, tmp_path):
    """A minute at a release: kills at each step of a commit."""
    killed, verdict = run(new_cluster(), tmp_path)
    print(f"\nseed {SEED}: {verdict}, killed: {dict(killed)}")
    assert killed.keys() >= {*STEPS, CRASH}
    assert verdict.written > 10
    assert (verdict.lost, verdict.twice) == (0, 0)


@PROOF
def test_the_campaign_catches_a_pointer_that_moves_by_a_commit_of_its_own(new_cluster, tmp_path):
    """Seconds: processes are killed until one was between both commits."""
    _, verdict = run(new_cluster(), tmp_path, TWO_COMMITS)
    assert verdict.twice > 0
