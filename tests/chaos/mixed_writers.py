"""Writers of the campaign over all feeds: each writes the changes of one feed, and notes them in a ledger."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import errors

from airflow_pgchange.messages import start_saga
from tests import queues
from tests.chaos import harness, mirror_writers
from tests.chaos.event_publishers import Publisher
from tests.chaos.event_worker import PAUSE, through_faults
from tests.chaos.harness import Campaign, commit_in_two_phases
from tests.chaos.steps import Reached, writers_connection
from tests.sagas import TOUR
from tests.suite.processes import runs

Connection = psycopg.Connection[Any]
Write = Callable[[Connection, random.Random], object]
CAMPAIGN = Campaign(delay=0.1)
LOCKED_OUT = (errors.DeadlockDetected, errors.LockNotAvailable)
"""Errors of a session that waited for another session's lock. Its transaction is rolled back, and the next begins."""
OPEN_SAGAS = "select count(*) > 10 from mbus.saga where state in ('forward', 'rolling back')"
"""Whether writers of sagas must wait.

Handlers are slow, because each of some ten messages of a saga has its own transaction.
"""
RANGE = 100
"""The number of buckets that move together."""


def end(connection: Connection, chance: random.Random) -> None:
    """End a transaction in a random way."""
    if chance.random() < CAMPAIGN.rollbacks:
        connection.execute("rollback")
    elif chance.random() < 0.1:
        commit_in_two_phases(connection, chance, CAMPAIGN.delay)
    else:
        connection.execute("commit")


def commits(connection: Connection, chance: random.Random) -> None:
    harness.write_some(connection, CAMPAIGN, chance)


def rows(connection: Connection, chance: random.Random) -> None:
    if mirror_writers.crowded(connection):
        time.sleep(PAUSE)
    else:
        mirror_writers.write_some(connection, chance, truncates=chance.random() < 0.2)


def events(began: float) -> Write:
    """Return a writer of events. A process that replaces another continues its numbers of events."""
    publisher = Publisher("", os.getpid(), CAMPAIGN, threading.Event(), threading.Event())
    numbers: Iterator[int] = itertools.count(int(1000 * (time.time() - began)))
    return lambda connection, chance: publisher.transaction(connection, chance, numbers)


def messages(connection: Connection, chance: random.Random) -> None:
    """Post messages to the queue: some with a delay, some that wait for another message, some rolled back."""
    connection.execute("begin")
    first = _post(connection, chance)
    for _ in range(chance.randint(0, 7)):
        _post(connection, chance, after=[first] if chance.random() < 0.2 else [])
    if chance.random() < 0.2:
        connection.execute("savepoint s")
        _post(connection, chance)
        if chance.random() < 0.5:
            connection.execute("rollback to s")
    end(connection, chance)


def _post(connection: Connection, chance: random.Random, after: list[str] | None = None) -> str:
    kind = chance.choice(["even", "odd"])
    delay = "300 ms" if chance.random() < 0.1 else None
    iid = queues.post(connection, 0, "orders", after=after or [], delay=delay, kind=kind)
    connection.execute("insert into posted (iid, kind) values (%s, %s)", [iid, kind])
    return iid


def sagas(connection: Connection, chance: random.Random) -> None:
    if connection.execute(OPEN_SAGAS).fetchone() == (True,):
        time.sleep(PAUSE)
        return
    connection.execute("begin")
    number = start_saga(connection, TOUR, {"tour_id": str(chance.random())})
    connection.execute("insert into started (saga) values (%s)", [number])
    end(connection, chance)


def topology(connection: Connection, chance: random.Random) -> None:
    """Continue the moves of buckets that have begun, or change a state or a master, or begin a move."""
    connection.execute("begin")
    moving = _moving(connection)
    try:
        if moving:
            _move_on(connection, *chance.choice(moving))
        else:
            _change(connection, chance)
    except psycopg.Error as error:
        if error.sqlstate != "PC008":
            raise
        # The catalogue refuses, for example, to make an instance that is offline the master.
        connection.execute("rollback")
        return
    end(connection, chance)


def _change(connection: Connection, chance: random.Random) -> None:
    name = chance.choice(["r1", "r2"])
    instance = f"{name}-i{chance.choice([1, 2])}"
    kind = chance.choice(["state", "state", "master", "buckets"])
    if kind == "state":
        state = chance.choice(["Online", "Offline"])
        connection.execute("select topology.set_state(%s, %s)", [instance, state])
    elif kind == "master":
        connection.execute("select topology.set_master(%s, %s)", [name, instance])
    else:
        first = RANGE * chance.randrange(3000 // RANGE)
        connection.execute(
            "select topology.move_buckets('default', %s, %s, 'copying', %s)", [first, first + RANGE - 1, name]
        )


def _moving(connection: Connection) -> list[tuple[int, int, str]]:
    """Return the ranges of buckets that are being moved, with their states."""
    return connection.execute(
        "select bucket_id_start, bucket_id_end, state from topology._pico_bucket where state <> 'active' order by 1"
    ).fetchall()


def _move_on(connection: Connection, first: int, last: int, state: str) -> None:
    following = {"copying": "copied", "copied": "active"}[state]
    connection.execute("select topology.move_buckets('default', %s, %s, %s)", [first, last, following])


def finish_moves(connection: Connection) -> None:
    """Complete all moves of buckets."""
    while moving := _moving(connection):
        _move_on(connection, *moving[0])


WRITERS: Mapping[str, Callable[[float], Write]] = {
    "commits": lambda began: commits,
    "rows": lambda began: rows,
    "events": events,
    "messages": lambda began: messages,
    "sagas": lambda began: sagas,
    "topology": lambda began: topology,
}


def run(
    source: str, kind: str, began: float, chance: random.Random, reached: Reached, stopped: Callable[[], bool]
) -> None:
    """Write until a stop is requested, and continue after any fault."""
    write, connect = WRITERS[kind](began), writers_connection(reached).connect

    def work() -> None:
        with connect(source, autocommit=True) as connection:
            commit_prepared(connection, lambda process: process == os.getpid())
            while not stopped():
                try:
                    write(connection, chance)
                except LOCKED_OUT:
                    connection.execute("rollback")
                time.sleep(chance.random() * 0.1)

    through_faults(work, stopped)


def commit_prepared(
    connection: Connection, whose: Callable[[int], bool] = lambda process: not runs(process)
) -> int:
    """Commit prepared transactions whose process is gone, or whose process makes ``whose`` true.

    Return their number.
    """
    found = connection.execute(
        "select gid from pg_prepared_xacts where database = current_database()"
    ).fetchall()
    left = [gid for (gid,) in found if whose(int(gid.split()[0]))]
    for gid in left:
        with suppress(errors.UndefinedObject, errors.ObjectInUse):
            connection.execute(f"commit prepared '{gid}'")
    return len(left)
