"""Many sagas at once, whose steps fail and whose handlers are killed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import psycopg
from psycopg.conninfo import make_conninfo

from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.errors import PgChangeError
from airflow_pgchange.sagas import RollBack, TryAgain, handle, start
from tests import queues
from tests.sagas import STEPS, TOUR, WORKED, note, prepare

SAGAS = 44
WORKERS = 3
KILL = """
select count(*) from (
    select pg_terminate_backend(pid) as hit from pg_stat_activity
    where application_name = 'saga worker' and datname = current_database() order by random() limit 1
) as shot where hit
"""
OPEN = "select count(*) from mbus.saga where state in ('forward', 'rolling back')"


@dataclass
class Worker:
    """Handles whatever is there, kills a handler now and then, perhaps itself, and counts what happened."""

    db: str
    seed: int
    killed: int = 0
    lost: int = 0
    put_off: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.conninfo = make_conninfo(self.db, application_name="saga worker")

    def run(self) -> None:
        with psycopg.connect(self.db, autocommit=True) as self.watch:
            while queues.one(self.watch, OPEN):
                for queue in self.chance.sample(WORKED, len(WORKED)):
                    try:
                        drain(Plan(QueueFeed(queue), self.conninfo, limit=1, max_batches=None), self.process)
                    except (PgChangeError, psycopg.Error):
                        self.lost += 1

    def process(self, transaction, batch):
        (change,) = transaction.changes()
        transaction.ack(lambda kept: handle(kept, change, self.do))
        self.kill()

    def do(self, work, connection):
        self.kill()
        note(work, connection)
        self.kill()
        # Of eleven sagas five are refused, each at another step, and some steps are put off once.
        if work.kind == "step" and work.saga % 11 == sorted(STEPS).index(work.step):
            return RollBack("full")
        if work.tries == 1 and self.chance.random() < 0.1:
            return TryAgain("engaged", timedelta())
        return None

    def kill(self):
        """A handler at work, whichever comes first."""
        if self.chance.random() < 0.03:
            self.killed += queues.one(self.watch, KILL)


def in_order(steps: list[str]) -> bool:
    """Whether each step comes behind those that it is after."""
    place = {step: n for n, step in enumerate(steps)}
    return all(
        before in place and place[before] < place[step.name]
        for step in TOUR.steps
        if step.name in place
        for before in step.after
    )


def test_each_saga_is_done_or_undone_once_and_in_order_though_handlers_are_killed(db, connect):
    connection = connect()
    prepare(connection)
    with connection.transaction():
        started = [start(connection, TOUR, {"n": str(n)}) for n in range(SAGAS)]
    workers = [Worker(db, seed) for seed in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        for running in [pool.submit(worker.run) for worker in workers]:
            running.result()
    assert sum(worker.killed for worker in workers) > 0
    assert sum(worker.lost for worker in workers) > 0

    states = dict(connection.execute("select id, state from mbus.sagas where stuck is null").fetchall())
    acts: dict[int, dict[str, list[str]]] = {saga: {} for saga in started}
    for saga, kind, step in connection.execute("select saga, kind, step from act order by n").fetchall():
        acts[saga].setdefault(kind, []).append(step)
    for saga in started:
        steps, compensations = acts[saga].get("step", []), acts[saga].get("compensation", [])
        assert in_order(steps)
        assert len(set(steps)) == len(steps)
        if saga % 11 < len(STEPS):
            assert states[saga] == "rolled back"
            assert sorted(STEPS)[saga % 11] not in steps
            assert sorted(compensations) == sorted(STEPS)
            assert (acts[saga].get("end"), acts[saga]["rolled back"]) == (None, [None])
        else:
            assert states[saga] == "complete"
            assert set(steps) == STEPS
            assert compensations == []
            assert (acts[saga]["end"], acts[saga].get("rolled back")) == ([None], None)
