"""A database under load needs nobody but ``airflow-pgchange maintain --every``: rows find a partition, history is
trimmed, consumers keep up, and nothing grows without bound."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.chaos.harness import FULL, PROOF, one
from tests.chaos.unattended import (
    ASLEEP,
    SETTINGS,
    Consumers,
    Load,
    Writers,
    maintenance,
    set_up,
    wait_until_read,
)
from tests.chaos.unattended_watch import OLDEST, Watch, broken, figures, stubborn
from tests.suite.servers import has_hstore

pytestmark = pytest.mark.release(
    "every run has benchmarks of a few seconds and tests of each step of maintenance"
)

SECONDS = float(os.environ.get("SECONDS", "1800" if FULL else "60"))
RATE = int(os.environ.get("RATE", "1000" if FULL else "200"))
"""Transactions a second. ``width`` follows it, so that a partition lasts as long as a million ids at 10,000 a second."""
LONG = SECONDS >= 600
PATIENCE = 120.0


def load_of(server: str) -> Load:
    """In a short campaign a partition lasts 5 seconds. The rate is measured over half a minute at least, so partitions
    for three times this are ready, as in a long one."""
    feeds = ("commits", "tubes", "events", *(["messages"] if has_hstore(server) else []))
    if LONG:
        return Load(RATE, SECONDS, partition=100, ahead=2, every=60, retention=180, feeds=feeds)
    return Load(RATE, SECONDS, partition=5, ahead=30, every=5, retention=10, feeds=feeds)


def run(cluster, folder, load, *, maintained=True):
    """Run a campaign, and return the promises that it broke."""
    db = cluster.conninfo()
    followed, asleep = set_up(db, load)
    log = folder / "maintenance"
    log.touch()
    consumers, process = Consumers(db), None
    watch = Watch(db, lambda: process and process.pid)
    with ExitStack() as stack:
        if maintained:
            process = stack.enter_context(maintenance(db, load, log))
        stack.callback(consumers.stop)
        stack.enter_context(watch.running())
        writers = Writers(cluster, folder, load)
        stack.callback(writers.kill)
        consumers.start(followed)
        time.sleep(load.seconds / 2)
        consumers.start(asleep, name=lambda kind: f"{ASLEEP} {kind}")
        writers.wait()
        wait_until_read(db, writers.written, consumers, PATIENCE)
        # History goes some runs after it has been read.
        time.sleep(2.5 * load.every + load.retention if maintained else 0)
        age = one(db, OLDEST)
    print(*figures(watch, log.read_text(), cluster.log), sep="\n")
    print("written:", writers.written)
    found = broken(watch, load, log.read_text(), cluster.log)
    found += [f"a consumer failed: {error}" for error in consumers.errors]
    found += [
        f"{name} were processed {done} times, not {writers.written[name.split()[-1]]}"
        for name, done in consumers.processed.items()
        if done != writers.written[name.split()[-1]]
    ]
    if age and age > 2 * load.retention + 2 * load.every + 2 * load.partition:
        found.append(f"history of {age:.0f} s")
    return found


@pytest.mark.timeout(7200)
def test_a_database_under_load_needs_nobody_but_the_maintenance_command(new_cluster, server, tmp_path):
    """Takes a minute, or in a release half an hour, with the rate and the times of a large database scaled down."""
    cluster = new_cluster(**SETTINGS)
    found = run(cluster, tmp_path, load_of(server))
    assert found == [], "\n".join(found)


@PROOF
def test_the_campaign_catches_that_nobody_maintains_the_database(new_cluster, server, tmp_path):
    """Takes seconds: until the partitions that were ready have been used up."""
    load = Load(200, 10, partition=2, ahead=2, every=1, retention=4)
    cluster = new_cluster(**SETTINGS)
    found = run(cluster, tmp_path, load, maintained=False)
    assert {line.split(":")[0] for line in found} >= {
        "no maintenance",
        "rows in default partitions",
        "findings",
    }


def test_a_burst_after_an_idle_night_leaves_no_row_in_a_default_partition(new_cluster, server, tmp_path):
    """Takes a minute: the rate is known half a minute after the burst began. Until then its commits find no partition."""
    cluster = new_cluster(**SETTINGS)
    db = cluster.conninfo()
    quiet = replace(
        load_of(server), rate=10, seconds=5, paced=20, partition=5, ahead=2, every=2, feeds=("commits",)
    )
    burst = replace(quiet, rate=None, seconds=60)
    followed, _ = set_up(db, quiet)
    log = tmp_path / "maintenance"
    consumers, watch = Consumers(db), Watch(db, lambda: None)
    with maintenance(db, quiet, log), ExitStack() as stack:
        stack.callback(consumers.stop)
        consumers.start(followed)
        written = Counter()
        for load in (quiet, burst):
            writers = Writers(cluster, tmp_path, load)
            stack.callback(writers.kill)
            with watch.running():
                writers.wait()
            written.update(writers.written)
        wait_until_read(db, written, consumers, PATIENCE)
    in_default = [sample.in_default for sample in watch.samples]
    print(in_default, written)
    assert max(in_default) > 0, "the burst was too slow for its partitions"
    assert in_default[-3:] == [0, 0, 0], log.read_text()
    assert consumers.processed == written
    assert consumers.errors == watch.errors == []
    assert " ERROR " not in log.read_text()
    assert stubborn(log.read_text(), quiet) == []
