"""Mirrors of tables behind tubes equal their source, row by row, whatever writers do and whoever is killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
import pytest

from tests.chaos import mirror
from tests.chaos.crew import crew
from tests.chaos.harness import FULL, PROOF, SEED
from tests.chaos.kills import until
from tests.chaos.mirror import RIGHT, change_workers, commit_late, judge, move, one
from tests.chaos.mirror_worker import TUBES, Backfill, Process, Worker, command, replay_by_seq_alone
from tests.chaos.mirror_writers import writing


@dataclass(frozen=True)
class Size:
    """The size of a campaign: processes, faults, and the numbers of workers that all tubes get in turn.

    At times there are more processes than workers. Then several processes compete for a worker.
    """

    processes: int
    workers: Sequence[int]
    writers: int
    kills: int = 1
    turns: int = 1


SMALL = Size(processes=3, workers=(3, 2), writers=4)
WHOLE = Size(5, (3, 5, 2), writers=8, kills=4 if FULL else 1, turns=10 if FULL else 1)


FAILED = "select exists (select from work where how = 'failed')"


def workers(source, results, processes, **options):
    return [
        command(Worker(source, results, number, f"{SEED} worker {number}", **options))
        for number in range(processes)
    ]


def kill_some(at_work, kills):
    """Kill workers in the middle of a batch, and one worker at any step."""
    killed, number = 0, 0
    while killed < kills:
        number = (number + 1) % len(at_work.running)
        killed += at_work.kill(number, only_at_work=True)
    at_work.kill(number)


def kill_a_backfill(source, backfills, tube):
    """Start a backfill, and kill it between its first and its last chunk. Return its number and its progress."""
    running = (
        "select id, looked_at from tube.backfill "
        "where tube = %s and tbl = 'sh0001.item'::regclass and state = 'running' and looked_at > 0"
    )
    found, number = [], len(backfills.running)
    backfills.add(command(Backfill(source, tube, 10)))
    with psycopg.connect(source, autocommit=True) as connection:
        while not found:
            process = backfills.running[number]
            until(
                lambda process=process: (
                    process.poll() is not None or connection.execute(running, [tube]).fetchall()
                ),
                "a backfill",
            )
            if process.poll() is None:
                assert backfills.kill(number)
                found = connection.execute(running, [tube]).fetchall()
            else:
                # The backfill ended before the test could kill it.
                assert process.returncode == 0, backfills.told()
                backfills.running[number] = backfills.start(backfills.commands[number])
    return found[0]


def run(source, results, folder, size, shape):
    """Run the campaign, and return counts of what writers and faults did."""
    mirror.set_up(source, results, 3, shape)
    with crew(source, folder, workers(source, results, size.processes, shape=shape)) as at_work:
        with writing(source, paced=True, writers=size.writers) as done:
            for turn in range(size.turns):
                with crew(source, folder) as backfills:
                    killed = [kill_a_backfill(source, backfills, tube) for tube in TUBES]
                    if turn == 0:
                        commit_late(source, 1, shape)
                    for place, number in enumerate(size.workers):
                        change_workers(source, number)
                        kill_some(at_work, size.kills)
                        if place == len(size.workers) - 2:
                            move(source, *((2, 3) if turn % 2 == 0 else (3, 2)), shape)
                    for process in backfills.running:
                        assert process.wait() == 0, backfills.told()
                for id, looked_at in killed:
                    # A truncation of its table may have left the backfill less to read.
                    resumed = "select state = 'done' and looked_at >= %s from tube.backfill where id = %s"
                    assert one(source, resumed, looked_at, id)
            until(lambda: one(source, FAILED), "a batch that failed")
        until(lambda: not mirror.pods_left(source), "the end of all pods")
        at_work.stop()
    return done + at_work.kills


def assert_everything_happened(source, counts, size):
    with psycopg.connect(source) as connection:
        how = dict(connection.execute("select how, count(*) from work group by 1").fetchall())
        told = dict(connection.execute("select what, count(*) from told group by 1").fetchall())
        changed = [row[0] for row in connection.execute("select distinct workers from work order by 1")]
    for what in [
        "insert",
        "update",
        "key",
        "delete",
        "rolled back",
        "undone savepoint",
        "prepared",
        "truncate",
    ]:
        assert counts[what] > 0, what
    assert counts["at work"] >= size.kills * len(size.workers) * size.turns
    assert min(how[what] for what in ("acked", "failed", "killed")) > 0
    assert min(told[what] for what in ("stale", "backfill_end with ids", "truncate with ids")) > 0
    assert changed == sorted(size.workers)


LARGER = pytest.mark.release("every run has a smaller campaign, in which all of this happens, too")
OTHERS = ("uuid", "text", "pair")


OTHER_KEYS = pytest.mark.release(
    "tests of each type of key are in every run, and the campaign is the same for all"
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("size", "shape"),
    [
        pytest.param(SMALL, "bigint", id="small"),
        pytest.param(WHOLE, "bigint", id="whole", marks=LARGER),
        *(pytest.param(WHOLE, shape, id=f"whole {shape}", marks=OTHER_KEYS) for shape in OTHERS),
    ],
)
def test_a_mirror_equals_its_source_and_no_id_is_in_two_batches_at_once(
    db, other_db, tmp_path, elsewhere, size, shape
):
    """Takes seconds: writers and workers are at work while one after the other is killed."""
    results = other_db if elsewhere else db
    counts = run(db, results, tmp_path, size, shape)
    assert judge(db, results) == RIGHT
    assert_everything_happened(db, counts, size)


@PROOF
def test_the_campaign_catches_a_position_by_seq_alone(db, tmp_path):
    mirror.set_up(db, db, 3)
    fault = workers(db, db, 3, failures=0, fault="by seq alone")
    with crew(db, tmp_path, fault) as at_work, writing(db, truncates=False):
        commit_late(db, 1)
        at_work.stop()
    for number in range(3):
        last = Process(Worker(db, db, number, "last", fault="by seq alone"))
        for feed in last.feeds.values():
            while replay_by_seq_alone(last.worker, feed, last.log):
                pass
    lost = {row[:3] for row in judge(db, db).differing}
    assert lost >= {(tube, "sh0001.item", mirror.LATE) for tube in TUBES}


@PROOF
def test_the_campaign_catches_workers_that_take_no_lock(db, tmp_path):
    """Takes seconds: workers have to meet at one id."""
    mirror.set_up(db, db, 1)
    with crew(db, tmp_path, workers(db, db, 3, fault="unlocked")), writing(db):
        until(lambda: judge(db, db).overlaps, "an id in two batches at once")
