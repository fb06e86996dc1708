"""Ten groups read each of their events once and in order, whatever publishers, consumers, servers and upkeep do."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import psycopg
import pytest

from tests.chaos import event_log
from tests.chaos.crew import crew
from tests.chaos.event_log import GROUPS, RIGHT, Verdict, commit_late, drain, inversions, judge
from tests.chaos.event_publishers import maintaining, publish, publishing, wait_for_more
from tests.chaos.event_worker import Consumer, command
from tests.chaos.harness import FULL, PROOF, Campaign, one
from tests.chaos.kills import until


@dataclass(frozen=True)
class Size:
    """The size of a campaign: the numbers of consumers that compete for the groups, of writers, and of kills."""

    processes: int
    kills: int
    writers: int
    maintained: bool
    turns: int = 1

    @property
    def campaign(self):
        return Campaign(writers=self.writers, delay=0.1)


SMALL = Size(processes=2, kills=1, writers=2, maintained=False)
WHOLE = Size(processes=4, kills=2, writers=4, maintained=True, turns=12 if FULL else 1)
"""The large campaign. Partitions are created and dropped while it runs."""
PUBLISHED = (
    "plain",
    "direct",
    "scheduled",
    "old",
    "prepared",
    "in a savepoint",
    "undone savepoint",
    "rolled back",
)
FAILED = "select exists (select from work where how = 'failed')"
MAINTAINED = ("added", "emptied", "kept", "dropped")


def consumers(source, results, processes, fault=""):
    return [
        command(Consumer(source, results, list(GROUPS), event_log.seeded(number), fault=fault))
        for number in range(processes)
    ]


def kill_some(at_work, kills):
    """Kill consumers in the middle of a batch, and one consumer at any step."""
    killed, number = 0, 0
    while killed < kills:
        number = (number + 1) % len(at_work.running)
        killed += at_work.kill(number, only_at_work=True)
    at_work.kill(number)


def crash(source, publishers, at_work):
    """Stop the server immediately in the middle of the work. Return the ids of an open and of a prepared event.

    At that moment all publishers work, and a consumer is in the middle of a batch.
    """
    wait_for_more(publishers)
    consumer = at_work.freeze_at_work()
    with psycopg.connect(source.conninfo(), autocommit=True) as connection:
        connection.execute("begin")
        kept = publish(connection, "prepared", [{"publisher": "nobody", "n": 1}])
        connection.execute("prepare transaction 'over the crash'")
        connection.execute("begin")
        gone = publish(connection, "open", [{"publisher": "nobody", "n": 2}])
        source.stop("immediate")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("commit")
    source.start()
    consumer.send_signal(signal.SIGCONT)
    with psycopg.connect(source.conninfo(), autocommit=True) as connection:
        connection.execute("commit prepared 'over the crash'")
    wait_for_more(publishers)
    return kept, gone


def run(source, results, folder, size):
    """Run the campaign. Return counts of its faults, and the acknowledged and the rolled-back events."""
    event_log.set_up(source.conninfo(), results)
    acknowledged, undone = [], []
    with crew(source.conninfo(), folder, consumers(source.conninfo(), results, size.processes)) as at_work:
        with (
            publishing(source.conninfo(), results, size.campaign) as publishers,
            maintaining(source.conninfo()) if size.maintained else nullcontext([]) as told,
        ):
            for _ in range(size.turns):
                acknowledged.append(commit_late(source.conninfo(), results))
                kill_some(at_work, size.kills)
                kept, gone = crash(source, publishers, at_work)
                acknowledged += kept
                undone += gone
            until(
                lambda: all(any(publisher.done[what] for publisher in publishers) for what in PUBLISHED),
                "publishers to do everything",
            )
            until(lambda: one(source.conninfo(), FAILED), "a batch that failed")
            if size.maintained:
                until(
                    lambda: {line.split()[0] for line in told}.issuperset(MAINTAINED),
                    "partitions to come and go",
                )
        at_work.stop()
    for publisher in publishers:
        assert publisher.errors == []
        acknowledged += publisher.acknowledged
    drain(source.conninfo(), results)
    counts = sum((publisher.done for publisher in publishers), Counter()) + at_work.kills
    counts.update(line.split()[0] for line in told)
    return counts, acknowledged, undone


def assert_everything_happened(source, results, counts, size):
    for what in (*PUBLISHED, *(MAINTAINED if size.maintained else ())):
        assert counts[what] > 0, what
    assert counts["cut off"] >= size.writers * size.turns
    assert counts["at work"] >= size.kills * size.turns
    assert counts["failed:"] == 0
    with psycopg.connect(source) as connection:
        how = dict(connection.execute("select how, count(*) from work group by 1").fetchall())
    assert min(how[what] for what in ("acked", "failed", "killed", "cut off")) > 0
    assert inversions(results) >= size.turns


LARGER = pytest.mark.release("every run has a smaller campaign, and tests of partitions that come and go")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "size", [pytest.param(SMALL, id="small"), pytest.param(WHOLE, id="whole", marks=LARGER)]
)
def test_each_group_gets_each_of_its_events_once_and_in_order(new_cluster, tmp_path, elsewhere, size):
    """Takes seconds: publishers and consumers are at work while one after the other is killed, and the server, too."""
    source = new_cluster()
    results = new_cluster().conninfo() if elsewhere else source.conninfo()
    counts, acknowledged, undone = run(source, results, tmp_path, size)
    assert judge(source.conninfo(), results, acknowledged) == RIGHT
    assert len(undone) == size.turns
    with psycopg.connect(results) as connection:
        rows = connection.execute(
            "select count(*) from effect where event_id = any (%s)", [undone]
        ).fetchone()
    assert rows == (0,)
    assert_everything_happened(source.conninfo(), results, counts, size)


@PROOF
def test_the_campaign_catches_a_cursor_by_id_alone(db, tmp_path):
    """Takes seconds: a writer has to commit late for the fault to show."""
    event_log.set_up(db, db)
    with crew(db, tmp_path, consumers(db, db, 2, "by id alone")) as at_work:
        with publishing(db, db, SMALL.campaign):
            late = commit_late(db, db)
        at_work.stop()
    drain(db, db, "by id alone")
    verdict = judge(db, db, [late])
    assert verdict.lost > 0
    assert (verdict.doubled, verdict.strayed, verdict.forgotten) == (0, 0, 0)


AGAIN = "insert into effect (group_id, event_id, position) select {}, event_id, position from {}"


@PROOF
@pytest.mark.parametrize(
    ("harm", "forgotten", "verdict"),
    [
        ("delete from effect where n = 1", [], Verdict(lost=1)),
        (AGAIN.format("group_id", "effect where n = 1"), [], Verdict(doubled=1, disordered=2)),
        (AGAIN.format("'direct'", "effect where n = 1"), [], Verdict(strayed=1)),
        (
            f"with gone as (delete from effect where n = 1 returning *) {AGAIN.format('group_id', 'gone')}",
            [],
            Verdict(disordered=2),
        ),
        ("select 1", ["pm"], Verdict(forgotten=1)),
    ],
)
def test_the_verdict_says_what_is_wrong(db, harm, forgotten, verdict):
    event_log.set_up(db, db)
    with psycopg.connect(db, autocommit=True) as connection:
        ids = publish(connection, "plain", [{"publisher": "1", "n": n} for n in range(5)])
    drain(db, db)
    assert judge(db, db, ids) == RIGHT
    with psycopg.connect(db) as connection:
        connection.execute(harm)
    assert judge(db, db, [*ids, *forgotten]) == verdict
