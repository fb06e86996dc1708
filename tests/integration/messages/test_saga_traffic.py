"""Many concurrent sagas with failing steps and killed handlers."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.messages import RollBack, TryAgain, handle_saga, start_saga
from tests import queues
from tests.sagas import STEPS, TOUR, WORKED, Act, is_right, note, prepare, ready, refused_step

pytestmark = pytest.mark.hstore

WORKERS = 3
PATIENCE = 50
"""A worker gives up after this number of rounds over all queues without progress, so that stuck sagas fail the test."""
KILL = """
select count(*) from (
    select pg_terminate_backend(pid) as hit from pg_stat_activity
    where application_name = 'saga worker' and datname = current_database() order by random() limit 1
) as shot where hit
"""
OPEN = "select count(*) from mbus.saga where state in ('forward', 'rolling back')"


@dataclass
class Worker:
    """Handles any ready message, and counts the outcomes.

    It kills handlers, perhaps itself: once at each step of handling a message, and later at random.
    """

    db: str
    seed: int
    killed: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    put_off: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.conninfo = make_conninfo(self.db, application_name="saga worker")

    def run(self) -> None:
        with psycopg.connect(self.db, autocommit=True) as self.watch:
            idle = 0
            while queues.one(self.watch, OPEN) and idle < PATIENCE:
                before = self.done
                for queue in self.chance.sample(WORKED, len(WORKED)):
                    if not ready(self.watch, queue):
                        continue
                    try:
                        drain(Plan(QueueFeed(queue), self.conninfo, limit=1, max_batches=None), self.process)
                    except (PgChangeError, psycopg.Error):
                        self.lost += 1
                idle = 0 if self.done > before else idle + 1

    def process(self, transaction, batch):
        (change,) = transaction.changes()
        transaction.ack(lambda kept: handle_saga(kept, change, self.do))
        self.done += 1
        self.kill("before the commit")

    def do(self, work, connection):
        self.kill("before the work")
        note(work, connection)
        self.kill("after the work")
        if work.kind == "step" and work.step == refused_step(work.saga):
            return RollBack("full")
        if work.attempt == 1 and (not self.put_off or self.chance.random() < 0.1):
            self.put_off += 1
            return TryAgain("engaged", timedelta())
        return None

    def kill(self, moment):
        """Run a handler on whichever message comes first."""
        if not self.killed[moment] or self.chance.random() < 0.03:
            self.killed[moment] += queues.one(self.watch, KILL)


@pytest.mark.parametrize(
    "sagas", [6, pytest.param(200, marks=pytest.mark.release("many more of the same sagas"))]
)
def test_each_saga_is_done_or_undone_once_and_in_order_though_handlers_are_killed(db, connect, sagas):
    """Takes seconds: handlers are killed at work, and their leases have to run out."""
    connection = connect()
    prepare(connection)
    with connection.transaction():
        started = [start_saga(connection, TOUR, {"n": str(n)}) for n in range(sagas)]
    workers = [Worker(db, seed) for seed in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        for running in [pool.submit(worker.run) for worker in workers]:
            running.result()
    killed = sum((worker.killed for worker in workers), Counter())
    assert killed.keys() == {"before the work", "after the work", "before the commit"}
    assert sum(worker.lost for worker in workers) > 0
    assert sum(worker.put_off for worker in workers) > 0

    states = dict(connection.execute("select id, state from mbus.sagas where stuck is null").fetchall())
    acts: dict[int, list[Act]] = {saga: [] for saga in started}
    for saga, kind, step in connection.execute("select saga, kind, step from act order by n").fetchall():
        acts[saga].append((kind, step))
    assert {refused_step(saga) for saga in started} == {*STEPS, None}
    states = {saga: states.get(saga, "stuck") for saga in started}
    wrong = [saga for saga in started if not is_right(states[saga], acts[saga], refused_step(saga))]
    assert {saga: (states[saga], acts[saga]) for saga in wrong} == {}


DONE: list[Act] = [("step", step) for step in ("room", "there", "back", "transfer_to", "transfer_from")]
UNDONE: list[Act] = [("compensation", step) for step in sorted(STEPS)]
BACK: Act = ("rolled back", None)


@pytest.mark.parametrize(
    ("state", "acts", "refused"),
    [
        ("complete", [*DONE[:4], ("end", None)], None),
        ("complete", [*DONE, DONE[0], ("end", None)], None),
        ("complete", [DONE[1], DONE[0], *DONE[2:], ("end", None)], None),
        ("forward", [*DONE, ("end", None)], None),
        ("rolled back", [*DONE[:3], *UNDONE[1:], BACK], "transfer_to"),
        ("rolled back", [*DONE[:3], *UNDONE, UNDONE[0], BACK], "transfer_to"),
        ("rolled back", [*DONE[:2], *UNDONE[:2], DONE[2], *UNDONE[2:], BACK], "transfer_to"),
        ("rolled back", [*DONE[:4], *UNDONE, BACK], "transfer_to"),
        ("rolled back", [*DONE[:3], *UNDONE], "transfer_to"),
        ("complete", [*DONE, ("end", None)], "transfer_to"),
    ],
)
def test_a_saga_that_is_neither_done_nor_undone_is_caught(state, acts, refused):
    assert is_right("complete", [*DONE, ("end", None)], None)
    assert is_right("rolled back", [*DONE[:3], *UNDONE, BACK], "transfer_to")
    assert not is_right(state, acts, refused)
