"""Writers of the tables behind tubes, with savepoints, rollbacks, prepared and slow transactions."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors

from tests.chaos.harness import SEED, commit_in_two_phases
from tests.chaos.mirror_worker import PAUSE, TABLES, TUBES

Connection = psycopg.Connection[Any]
TRUNCATED = ("sh0002.item", "sh0003.item", "sh0004.item")
WRITTEN = 300
"""Writers touch the ids from 1 to WRITTEN, and sometimes add 1000 to an id."""
STATES = ("open", "closed")
CROWDED = 300
"""If a tube has more pods, writers wait for its workers: pods of a backfill come last, and would otherwise never be
processed."""
OTHER = "t.id + case when t.id < 500 then 1000 else -1000 end"


@contextmanager
def writing(
    source: str, truncates: bool = True, paced: bool = False, writers: int = 8
) -> Iterator[Counter[str]]:
    """Run writers until the block ends, and yield counts of their work.

    If they are ``paced``, they wait for the workers.
    """
    stopping, done = threading.Event(), [Counter[str]() for _ in range(writers)]
    threads = [
        threading.Thread(
            target=write, args=(source, f"{SEED} writer {n}", truncates, paced, stopping, done[n])
        )
        for n in range(writers)
    ]
    together: Counter[str] = Counter()
    for thread in threads:
        thread.start()
    try:
        yield together
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        for each in done:
            together.update(each)


def write(
    source: str, seed: str, truncates: bool, paced: bool, stopping: threading.Event, done: Counter[str]
) -> None:
    """Run one writer. Its transactions have a few changes; some are rolled back, prepared, slow, or have savepoints."""
    chance = random.Random(seed)
    with psycopg.connect(source, autocommit=True) as connection:
        while not stopping.is_set():
            done.update(write_some(connection, chance, truncates))
            while paced and crowded(connection) and not stopping.is_set():
                time.sleep(PAUSE)


def write_some(connection: Connection, chance: random.Random, truncates: bool) -> Counter[str]:
    """Write one transaction. Return the changes that were committed, or the error for which it was rolled back."""
    made: Counter[str] = Counter()
    connection.execute("begin")
    try:
        for _ in range(chance.randint(1, 4)):
            _change_in_savepoint(connection, chance, truncates, made)
    except (errors.DeadlockDetected, errors.UniqueViolation, errors.SerializationFailure) as error:
        connection.execute("rollback")
        return Counter({type(error).__name__: 1})
    if chance.random() < 0.3:
        time.sleep(chance.random() * 0.1)
    return _end(connection, chance, made)


def crowded(connection: Connection) -> bool:
    """Whether a tube has so many pods that its writers must wait."""
    return any(
        connection.execute(f"select exists (select from {tube} offset {CROWDED})").fetchone() == (True,)
        for tube in TUBES
    )


def _change_in_savepoint(
    connection: Connection, chance: random.Random, truncates: bool, made: Counter[str]
) -> None:
    if chance.random() > 0.3:
        _change(connection, chance, truncates, made)
        return
    connection.execute("savepoint s")
    if chance.random() < 0.5:
        _change(connection, chance, truncates, made)
        connection.execute("release s")
    else:
        _change(connection, chance, truncates, Counter())
        connection.execute("rollback to s")
        made["undone savepoint"] += 1


def _change(connection: Connection, chance: random.Random, truncates: bool, made: Counter[str]) -> None:
    table = chance.choice(TABLES)
    ids = chance.sample(range(1, WRITTEN + 1), chance.choice([1, 1, 3, 20]))
    kind = chance.choices(["insert", "update", "key", "delete", "truncate"], [30, 35, 10, 20, 2 * truncates])[
        0
    ]
    if kind == "truncate":
        table = chance.choice(TRUNCATED)
    connection.execute(
        {
            "insert": f"insert into {table} select unnest(%(ids)s::bigint[]), %(state)s, %(word)s, %(rank)s "
            "on conflict do nothing",
            "update": f"update {table} set state = %(state)s, word = %(word)s, rank = %(rank)s where id = any (%(ids)s)",
            "key": f"update {table} as t set id = {OTHER} where id %% 1000 = any (%(ids)s) "
            f"and not exists (select from {table} as o where o.id = {OTHER})",
            "delete": f"delete from {table} where id %% 1000 = any (%(ids)s)",
            "truncate": f"truncate {table}",
        }[kind],
        {
            "ids": ids,
            "state": chance.choice(STATES),
            "word": f"word {chance.random()}",
            "rank": chance.choice([None, 1, 2, 3]),
        },
    )
    made[kind] += 1


def _end(connection: Connection, chance: random.Random, made: Counter[str]) -> Counter[str]:
    """End the transaction in a random way, and return the changes that were committed."""
    end = chance.random()
    if end < 0.2:
        connection.execute("rollback")
        return Counter({"rolled back": 1, "undone truncate": made["truncate"]})
    if end < 0.3:
        commit_in_two_phases(connection, chance, 0.05)
        return made + Counter({"prepared": 1})
    connection.execute("commit")
    return made + Counter({"committed": 1})
