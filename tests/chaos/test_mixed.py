"""All five feeds at once process each change exactly once, whatever writers, consumers, servers and people do."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from dataclasses import replace

import psycopg
import pytest

from demo.postgres import free_port
from tests.batches import connections_reused
from tests.chaos import mixed
from tests.chaos.crew import crew
from tests.chaos.event_log import GROUPS
from tests.chaos.faults import Faults
from tests.chaos.harness import FULL, SEED, harmed
from tests.chaos.kills import until
from tests.chaos.mixed_place import Notes, Place
from tests.chaos.mixed_verdict import Count, judge, judge_clients
from tests.chaos.mixed_worker import Member
from tests.chaos.mixed_writers import WRITERS
from tests.suite.servers import has_hstore
from tests.topology import make_catalogue

pytestmark = pytest.mark.release(
    "every run has campaigns of the event log and of mirrors, and tests of each other feed"
)

SECONDS = float(os.environ.get("SECONDS", "400" if FULL else "10"))
"""The seconds during which faults happen. The three seeds of a release take 20 minutes in all."""
WRITER_OF = {"tubes": "rows", "handlers": "events"}
"""The writer for a kind of consumer, if the writer has another name."""
SEVERAL = {"tubes": 3, "events": 2, "handlers": 2, "commits": 2, "messages": 2, "sagas": 2}
"""The number of processes that compete for a feed; default: 1."""


def client_of(relay):
    return f"host=127.0.0.1 port={relay} user=ann dbname=any"


def members(place, feeds, relay):
    """The processes of the campaign."""
    began = time.time()

    def made(role, kind, number=0):
        name = f"{SEED} {role} {kind} {number}"
        return Member(role, kind, number, replace(place, seed=name), client_of(relay), began)

    writers = dict.fromkeys(WRITER_OF.get(feed, feed) for feed in feeds)
    return {
        "writers": [made("writer", kind) for kind in writers],
        "consumers": [
            *(made("consumer", feed, number) for feed in feeds for number in range(SEVERAL.get(feed, 1))),
            replace(made("relay", ""), relay=f"127.0.0.1:{relay}"),
            made("client", ""),
        ],
        "helpers": [made("helper", "backfills"), made("helper", "upkeep")],
    }


def run(server, place, feeds, folder, relay):
    """Run the campaign, and return counts of the faults that happened."""
    mixed.set_up(place.source, place.results, feeds)
    each = members(place, feeds, relay)
    with ExitStack() as started:
        crews = {}
        for name in ("consumers", "writers", "helpers"):
            (folder / name).mkdir()
            commands = [member.command for member in each[name]]
            crews[name] = started.enter_context(crew(place.source, folder / name, commands, "began"))
        faults = Faults(server, crews, each, random.Random(f"{SEED} faults"))
        until(lambda: all(one.sign.exists() for some in each.values() for one in some), "all to begin")
        faults.rage(SECONDS, pause=0.3)
        crews["writers"].stop()
        crews["helpers"].stop()
        mixed.end_what_writers_left(place.source)
        known = mixed.what_clients_know(place, crews["consumers"].running[-1].pid, client_of(relay))
        crews["consumers"].stop()
    with connections_reused():
        mixed.drain(place, feeds)
    assert faults.missing == []
    return faults.fired, known


@pytest.mark.timeout(7200)
def test_each_change_of_each_feed_is_processed_exactly_once(new_cluster, server, tmp_path):
    """Takes minutes: all processes work while faults happen, which are drawn from a seed."""
    cluster = new_cluster(autovacuum="on", autovacuum_naptime="5s")
    feeds = [feed for feed in mixed.ALL if feed not in ("messages", "sagas") or has_hstore(server)]
    elsewhere, in_order = random.Random(f"{SEED} ways").choices([False, True], k=2)
    source = results = cluster.conninfo()
    if elsewhere:
        with psycopg.connect(cluster.conninfo("template1"), autocommit=True) as connection:
            connection.execute("create database results template postgres")
        results = cluster.conninfo("results")
    place = Place(source, results, str(tmp_path), "", [*GROUPS], in_order)
    fired, known = run(cluster, place, feeds, tmp_path, free_port())
    found = judge(place, feeds) | judge_clients(place, known)
    print(f"seed {SEED}, results elsewhere: {elsewhere}, commits in order: {in_order}")
    for line in [*sorted(fired.items()), *found.items()]:
        print(*line)
    assert [feed for feed, count in found.items() if not count.is_right] == []


def write(source, kind, transactions=4):
    """Run some transactions of a writer."""
    chance = random.Random(f"{SEED} {kind}")
    with psycopg.connect(source, autocommit=True) as connection:
        write = WRITERS[kind](time.time())
        for _ in range(transactions):
            write(connection, chance)


@pytest.mark.hstore
@pytest.mark.parametrize("fault", ["", "skips", "doubles"])
@pytest.mark.parametrize("feed", mixed.ALL)
def test_the_campaign_catches_a_consumer_that_skips_or_doubles_a_change(db, tmp_path, feed, fault):
    """Takes seconds: a backfill and a saga consist of many transactions."""
    mixed.set_up(db, db)
    write(db, WRITER_OF.get(feed, feed))
    place = Place(db, db, str(tmp_path), "one", [*GROUPS], failures=0, fault=fault)
    with connections_reused():
        mixed.drain(place, [feed])
    found = judge(place, [feed]).values()
    assert all(count.expected > 0 for count in found)
    assert [fault == "skips", fault == "doubles"] == [
        any(count.lost for count in found),
        any(count.twice for count in found),
    ]


@pytest.mark.parametrize(
    ("fault", "known", "expected"),
    [
        ("", "right", Count(7)),
        ("skips", "right", Count(7, lost=1)),
        ("doubles", "right", Count(7, twice=1, disordered=1)),
        ("", "wrong", Count(7, lost=1)),
    ],
)
def test_the_campaign_catches_a_client_that_misses_or_repeats_a_change(db, tmp_path, fault, known, expected):
    with psycopg.connect(db, autocommit=True) as connection:
        make_catalogue(connection)
        first, *changes = connection.execute("select term, index from topology.log order by 1, 2").fetchall()
    place = Place(db, db, str(tmp_path), "one")
    notes = Notes.of(place, "client")
    notes.write(snapshot=first)
    for change in harmed(changes, fault):
        notes.write(event=change)
    notes.write(picture=known)
    assert judge_clients(place, "right") == {"topology clients": expected}
