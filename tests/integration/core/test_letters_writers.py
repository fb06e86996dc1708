"""Batches are given up and sent again while other sessions write and read: each commit is processed exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import (
    BatchNotFinished,
    ConsumerBusy,
    LetterRefused,
    StaleClaim,
    UnknownConsumer,
    UnknownLetter,
)
from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.feeds.connections import connect as open_connection
from airflow_pgchange.feeds.draining import drain
from tests.chaos.harness import Campaign, judge, prepare_results, write
from tests.letters import Poison, plan
from tests.tubes import attach, make

NOT_NOW = (BatchNotFinished, ConsumerBusy, LetterRefused, StaleClaim, UnknownConsumer, UnknownLetter)

TURNS = 30
"""The maximum rounds of the writers until a letter was sent again beside them. A busy machine delays that."""


class Run:
    """Run consumers that sometimes fail, and a person who skips batches and sends letters again, until a stop is
    requested."""

    def __init__(self, feed, results, source, seed):
        self.feed, self.results, self.source, self.seed = feed, results, source, seed
        self.stopping = threading.Event()
        self.errors = []
        self.resent = 0

    def process(self, chance, failing):
        def one_batch(transaction, batch):
            ids = [change.id for change in transaction.changes()]
            store = "insert into processed (commit_id) select unnest(%s::bigint[])"
            if chance.random() < failing:
                raise Poison
            transaction.ack(lambda connection: connection.execute(store, [ids]))
            if chance.random() < failing:
                raise Poison

        return one_batch

    def consume(self, number):
        chance = random.Random(f"{self.seed} consumer {number}")
        while not self.stopping.is_set():
            options = {
                "limit": chance.choice([1, 5, 40]),
                "max_attempts": chance.choice([1, 2]),
                "max_batches": 5,
            }
            try:
                drain(plan(self.results, self.source, feed=self.feed, **options), self.process(chance, 0.2))
            except (Poison, *NOT_NOW):
                continue

    def look_after(self):
        chance = random.Random(f"{self.seed} person")
        with open_connection(self.results) as results, open_connection(self.source) as source:
            while not self.stopping.wait(0.02):
                try:
                    if chance.random() < 0.2:
                        manual_operations.skip_batch(results, source, self.feed, "by a person")
                    found = dead_letters.letters(results)
                    if found:
                        dead_letters.redrive(results, source, ids=[chance.choice(found).id])
                        self.resent += 1
                except NOT_NOW:
                    continue

    def guarded(self, function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:
            self.errors.append(error)
            raise

    def settle(self):
        """Process everything that is left: letters are sent again, and nothing fails any more."""
        with open_connection(self.results) as results, open_connection(self.source) as source:
            while True:
                left = dead_letters.letters(results)
                dead_letters.redrive(results, source, older_than="0 s")
                given = plan(self.results, self.source, feed=self.feed, limit=10_000, max_attempts=1000)
                if drain(given, self.process(random.Random(0), 0)).batches == 0 and not left:
                    return


def write_some(run, source, seed):
    """Run writers for a second."""
    writers = Campaign(writers=6, seconds=1, delay=0.2, seed=seed)
    deadline = time.monotonic() + writers.seconds
    writing = [
        threading.Thread(target=run.guarded, args=(write, source, writers, n, deadline)) for n in range(6)
    ]
    for thread in writing:
        thread.start()
    for thread in writing:
        thread.join()


def campaign(feed, results, source, seed):
    prepare_results(results)
    run = Run(feed, results, source, seed)
    others = [threading.Thread(target=run.guarded, args=(run.consume, n)) for n in range(3)]
    others.append(threading.Thread(target=run.guarded, args=(run.look_after,)))
    for thread in others:
        thread.start()
    for turn in range(TURNS):
        write_some(run, source, f"{seed} {turn}")
        if run.resent:
            break
    run.stopping.set()
    for thread in others:
        thread.join()
    run.settle()
    return run


OTHER_PAIRS = pytest.mark.release("each of the two ways of each choice is in every run")


@pytest.mark.parametrize(
    ("in_order", "apart"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=OTHER_PAIRS),
        pytest.param(True, True, marks=OTHER_PAIRS),
    ],
)
def test_each_commit_is_processed_once_whatever_is_given_up_and_sent_again(db, other_db, in_order, apart):
    """Takes seconds: batches are given up and sent again while writers are at work."""
    results = other_db if apart else db
    run = campaign(CommitFeed("test", 0, in_order=in_order), results, db, seed=7)
    assert run.errors == []
    assert run.resent > 0
    verdict = judge(results, db)
    assert verdict.written > 100
    assert (verdict.lost, verdict.doubled) == (0, 0)


def test_each_touch_of_a_tube_is_worked_though_batches_are_given_up_and_sent_again(db, connect_to):
    """Takes seconds: two writers are at work while batches are given up and sent again."""
    connection = connect_to(db)
    connection.execute("create table item (id bigint generated always as identity primary key)")
    make(connection)
    attach(connection)
    connection.execute("create table worked (id bigint)")
    chance, stopping = random.Random(3), threading.Event()
    given = plan(db, feed=TubeFeed("q"), limit=20)

    def process(failing):
        def one_batch(transaction, batch):
            ids = [change.id for change in transaction.changes()]
            if chance.random() < failing:
                raise Poison
            transaction.ack(lambda c: c.execute("insert into worked select unnest(%s::bigint[])", [ids]))

        return one_batch

    def writing():
        writer = connect_to(db)
        for _ in range(60):
            writer.execute("insert into item select from generate_series(1, 3)")
        stopping.set()

    writers = [threading.Thread(target=writing) for _ in range(2)]
    for writer in writers:
        writer.start()
    sent = 0
    while not stopping.is_set():
        drain(given, process(0.3))
        sent += len(dead_letters.redrive(connection, older_than="0 s"))
    for writer in writers:
        writer.join()
    drain(given, process(0.3))
    sent += len(dead_letters.redrive(connection, older_than="0 s"))
    drain(given, process(0))
    assert sent > 0
    counts = Counter(row[0] for row in connection.execute("select id from worked").fetchall())
    assert counts == Counter(row[0] for row in connection.execute("select id from item").fetchall())
