"""Calls in SQL receive each message of a queue exactly once, and soon, whatever process is killed."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from tests.chaos import mixed
from tests.chaos.crew import WORK, crew
from tests.chaos.faults import WAITED, Faults
from tests.chaos.harness import FULL, PROOF, SEED
from tests.chaos.kills import until
from tests.chaos.mixed_place import Place
from tests.chaos.mixed_verdict import judge
from tests.chaos.mixed_worker import Member
from tests.chaos.mixed_writers import commit_prepared

pytestmark = pytest.mark.release(
    "every run kills sessions of posters and consumers, in test_queue_traffic.py"
)

SECONDS = float(os.environ.get("SECONDS", "60" if FULL else "6"))
"""Seconds during which faults happen."""
SOON = 2.0
"""The seconds after the last post within which everything must be received."""
PATIENCE = 10.0
"""The seconds after the last post within which a campaign that loses nothing must end on a busy machine."""
CONSUMERS = {
    "singles": ["singles"] * 4,
    "batches": ["batches"] * 4,
    "both": ["singles", "singles", "batches", "batches"],
}
OF_OTHERS = ("number of workers changed", "lock storm", WAITED, "vacuum full")
"""Faults that only the campaign over all feeds has: while tables are locked, nobody can receive soon."""
DUE = "select count(*) + count(*) filter (where kind = 'even') - (select count(*) from received) from posted"
"""Return the number of messages that the two consumers have not received yet."""
FORGET = """
create function forget() returns trigger language plpgsql as $$
begin
    delete from mbus.receipt as r where r.ctid = (
        select x.ctid from mbus.receipt as x where x.queue = new.queue and x.id = new.id limit 1);
    return null;
end
$$;
create trigger forgets after insert on mbus.receipt for each row when (random() < 0.05) execute function forget();
"""
SKIP = """
create function skip() returns trigger language plpgsql as $$
begin
    new.done := new.done + 1;
    return new;
end
$$;
create trigger skips before insert or update on mbus.{} for each row when (new.consumer > 0 and new.done > 0)
    execute function skip();
"""
PLANTED = [
    pytest.param("singles", FORGET, "twice", id="a receipt is not kept"),
    pytest.param("singles", SKIP.format("level"), "lost", id="a level is one message too high"),
    pytest.param("batches", SKIP.format("position"), "lost", id="a position is one message too far"),
]


def members(place, kinds):
    """Return the processes of the campaign, by crew."""

    def made(role, kind, number=0):
        name = f"{SEED} {role} {kind} {number}"
        return Member(role, kind, number, replace(place, seed=name), began=time.time())

    return {
        "writers": [made("writer", "messages", number) for number in range(3)],
        "consumers": [made("consumer", kind, number) for number, kind in enumerate(kinds)],
        "helpers": [made("helper", "upkeep")],
    }


def seconds_to_receive_the_rest(source):
    """Wait until everything is received. Return the seconds that it took, or infinity if messages are missing."""
    began = time.monotonic()
    with psycopg.connect(source, autocommit=True) as connection:
        while (took := time.monotonic() - began) < PATIENCE:
            if connection.execute(DUE).fetchone() <= (0,):
                return took
            time.sleep(0.05)
    return float("inf")


def run(server, place, kinds, planted=""):
    """Run the campaign. Return the seconds from the last post until everything was received."""
    with psycopg.connect(place.source, autocommit=True) as connection:
        connection.execute(WORK)
        mixed.make_queue(connection)
        connection.execute(planted)
    each = members(place, kinds)
    with ExitStack() as started:
        crews = {}
        for name, some in each.items():
            folder = Path(place.folder) / name
            folder.mkdir()
            commands = [member.command for member in some]
            crews[name] = started.enter_context(crew(place.source, folder, commands, "began"))
        faults = Faults(server, crews, each, random.Random(f"{SEED} faults"), OF_OTHERS)
        until(lambda: all(member.sign.exists() for some in each.values() for member in some), "all to begin")
        faults.rage(SECONDS, pause=0.3)
        assert faults.missing == []
        crews["writers"].stop()
        with psycopg.connect(place.source, autocommit=True) as connection:
            commit_prepared(connection, lambda process: True)
        took = seconds_to_receive_the_rest(place.source)
        crews["helpers"].stop()
        crews["consumers"].stop()
    print(f"seed {SEED}, {took:.2f} s after the last post", *sorted(faults.fired.items()), sep="\n")
    return took


@pytest.fixture
def place(own_database, tmp_path):
    return Place(own_database, own_database, str(tmp_path), "")


@pytest.mark.hstore
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", CONSUMERS.values(), ids=CONSUMERS)
def test_each_message_is_received_once_and_soon(own_cluster, place, kinds):
    """Takes seconds: processes are killed at their work and replaced, and the server is stopped."""
    took = run(own_cluster, place, kinds)
    [count] = judge(place, ["messages"]).values()
    print(count)
    assert count.is_right
    assert took < SOON


@PROOF
@pytest.mark.hstore
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "planted", "wrong"), PLANTED)
def test_the_campaign_catches_a_fault_of_the_queue(own_cluster, place, kind, planted, wrong):
    """Takes seconds: the campaign with its kills."""
    run(own_cluster, place, CONSUMERS[kind], planted)
    [count] = judge(place, ["messages"]).values()
    assert getattr(count, wrong) > 0
