"""A batch that fails by its own content is split until the bad change is alone, for every feed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.errors import BatchGivenUp, ServerUnavailable
from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.feeds.draining import Drained, Plan, drain
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queries import ask
from tests import commits, queues, tubes
from tests.events import publish, subscribe
from tests.ledger import Connect
from tests.letters import Poison
from tests.sixth_feed.diary import DiaryFeed

pytestmark = pytest.mark.usefixtures("few_sessions")

DIARY = Path(__file__).parents[2] / "sixth_feed" / "diary.sql"
N = 8
"""The changes of a batch."""
LIMIT = N + 2
"""The limit of a batch. A tube counts an id once for each of its pods."""
ATTEMPTS = 2
"""``max_attempts``."""

Connection = psycopg.Connection[Any]


def _by_statements(query: str) -> Callable[[Connection], None]:
    def write(connection: Connection) -> None:
        for _ in range(N):
            connection.execute(query)

    return write


def _diary(connection: Connection) -> None:
    with connection.transaction():
        connection.execute(DIARY.read_bytes(), prepare=False)


def _commits(connection: Connection) -> None:
    """Write commits in three transactions, so that halves of the batch begin and end within a transaction."""
    for n in (3, 4, 1):
        commits.commits(connection, n)


def _tube(connection: Connection) -> None:
    connection.execute("create table public.item (id bigserial primary key, n integer)")
    tubes.make(connection)
    tubes.attach(connection)


def _pods(*sizes: int) -> Callable[[Connection], None]:
    """Return a function that inserts rows by one statement for each size, and touches two of the rows again.

    Each statement makes a pod.
    """

    def write(connection: Connection) -> None:
        for n in sizes:
            connection.execute("insert into public.item (n) select n from generate_series(1, %s) as n", [n])
        connection.execute(
            "update public.item set n = 0 where id in (select id from public.item order by id desc limit 2)"
        )

    return write


def _messages(connection: Connection) -> None:
    for n in range(N):
        queues.post(connection, n)


FEEDS: dict[str, tuple[Feed, Callable[[Connection], Any], Callable[[Connection], Any]]] = {
    "commit": (
        CommitFeed("c", 0),
        lambda connection: None,
        _by_statements("insert into revision.commit default values"),
    ),
    "commits of few transactions": (CommitFeed("c", 0), lambda connection: None, _commits),
    "event": (
        EventFeed("g"),
        lambda connection: subscribe(connection, "g"),
        lambda connection: publish(connection, *"t" * N),
    ),
    "topology": (
        TopologyFeed("c"),
        lambda connection: None,
        _by_statements("select topology.add_replicaset('r' || count(*) + 1) from topology._pico_replicaset"),
    ),
    "diary": (DiaryFeed("ann"), _diary, _by_statements("insert into diary.line (words) values ('one')")),
    "tube": (TubeFeed("q"), _tube, _pods(N)),
    "tube of several pods": (TubeFeed("q"), _tube, _pods(3, 4, 1)),
    "queue": (QueueFeed("q"), queues.make, _messages),
}
IN_EVERY_RUN = ("commits of few transactions", "tube of several pods", "queue")


def _given(name: str, *marks: pytest.MarkDecorator) -> Any:
    needs = [pytest.mark.hstore] if name == "queue" else []
    return pytest.param(*FEEDS[name], id=name, marks=[*marks, *needs])


each = pytest.mark.parametrize(("feed", "make", "write"), [_given(name) for name in FEEDS])
one_of_each = pytest.mark.parametrize(
    ("feed", "make", "write"),
    [
        _given(name)
        if name in IN_EVERY_RUN
        else _given(
            name, pytest.mark.release("feeds of a trait have the same claim, which one of them shows")
        )
        for name in FEEDS
    ],
)
places_of_bad_changes = pytest.mark.parametrize(
    "places",
    [
        {0, N - 1},
        pytest.param({3}, marks=pytest.mark.release("the first and the last change are in every run")),
        pytest.param({1, 6}, marks=pytest.mark.release("two other changes are in every run")),
    ],
    ids=str,
)
"""The places of the bad changes in a batch: a set for each case."""


class Work:
    """The work of a consumer: the changes that it processed, how often, and which of them are bad."""

    def __init__(self, feed: Feed, db: str, **plan: Any) -> None:
        self.plan = Plan(feed, db, **{"limit": LIMIT, "max_batches": None, "max_attempts": ATTEMPTS, **plan})
        self.bad: set[Any] = set()
        self.places: Iterable[int] = ()
        self.error: Exception = Poison("bad")
        self.tries: list[tuple[str, int, list[Any]]] = []
        self.done: list[Any] = []

    def process(self, transaction: ConsumerTransaction, batch: Any) -> None:
        ids = [change.id for change in transaction.changes()]
        self.tries.append((batch.id, batch.attempt, ids))
        self.bad |= {ids[place] for place in self.places}
        self.places = ()
        if self.bad & set(ids):
            raise self.error
        transaction.ack()
        self.done += ids

    def run(self) -> Drained:
        return drain(self.plan, self.process)

    def run_to_the_end(self) -> Drained:
        """Retry a failed task, as Airflow does."""
        for _ in range(100):
            with suppress(Poison):
                return self.run()
        raise AssertionError("the task fails without end")


def fresh(feed: Feed, make: Any, write: Any, db: str, connection: Connection, **plan: Any) -> Work:
    """A consumer with one batch of changes that are ready."""
    make(connection)
    Work(feed, db).run()
    write(connection)
    return Work(feed, db, **plan)


def bound(poisons: int) -> int:
    """The maximum number of attempts on a batch and its parts."""
    return ATTEMPTS * (1 + poisons * 2 * math.ceil(math.log2(N)))


def split_at(connection: Connection, feed: Feed) -> list[str]:
    """Return the ids of the batches that were split, the first first."""
    query = "select batch_id::text from pgchange.batches(%s) where split_at is not null order by split_at"
    return [row[0] for row in connection.execute(query, [feed.name]).fetchall()]


@each
@places_of_bad_changes
def test_only_the_bad_changes_become_dead_letters(
    feed: Feed, make: Any, write: Any, places: set[int], db: str, connect: Connect
) -> None:
    connection = connect()
    work = fresh(feed, make, write, db, connection)
    work.places = places
    drained = work.run_to_the_end()
    whole, _, ids = work.tries[0]
    assert work.done == [each for each in ids if each not in work.bad]
    letters = dead_letters.letters(connection)
    assert [letter.changes for letter in letters] == [1] * len(places)
    assert {letter.error for letter in letters} == {"tests.letters.Poison: bad"}
    assert list(drained.letters) == [letter.id for letter in letters]
    alone = [tried for tried in work.tries if len(tried[2]) == 1 and work.bad & set(tried[2])]
    assert [attempt for _, attempt, _ in alone] == [1, 2] * len(places)
    assert len(work.tries) <= bound(len(places))
    assert drained.splits == (whole,)
    assert drained.extra_attempts == len(work.tries) - ATTEMPTS
    halved = {batch for batch, _, tried in work.tries if work.bad & set(tried) and len(tried) > 1}
    assert set(split_at(connection, feed)) == halved
    assert split_at(connection, feed)[0] == whole
    # Each dead letter that is sent again is the same change.
    again = Work(feed, db, max_attempts=None)
    dead_letters.redrive(connection, consumer=feed.name)
    again.run()
    if feed.kind != "event":
        assert set(again.done) == work.bad
    assert len(again.done) == len(work.bad)


@one_of_each
def test_a_part_names_the_batches_of_which_it_is_a_part_and_the_first_claim_of_the_whole(
    feed: Feed, make: Any, write: Any, db: str, connect: Connect
) -> None:
    """So an external sink can recognise the part: it has it if it recorded one of these batches since that claim."""
    work = fresh(feed, make, write, db, connect())
    work.places = {2}
    held: dict[str, set[Any]] = {}
    within: list[tuple[str, ...]] = []
    first_claims: set[str | None] = set()

    def process(transaction: ConsumerTransaction, batch: Any) -> None:
        held.setdefault(batch.id, {change.id for change in transaction.changes()})
        within.append(batch.parts_of)
        first_claims.add(batch.first_claimed_at)
        for outer in batch.parts_of:
            assert held[batch.id] < held[outer]
        work.process(transaction, batch)

    for _ in range(ATTEMPTS):
        with suppress(Poison):
            drain(work.plan, process)
    whole = work.tries[0][0]
    assert within[:ATTEMPTS] == [()] * ATTEMPTS
    assert {outer[0] for outer in within[ATTEMPTS:]} == {whole}
    assert max(map(len, within)) >= 2
    assert within[-1] == (whole,)
    assert len(first_claims) == 1
    assert None not in first_claims


def fail_once(feed: Feed, db: str, error: Exception | None = None) -> tuple[str, list[Any]]:
    """Claim a batch, fail, and store the error. Return the batch's id and its changes."""
    error = error or Poison("bad")
    with suppress(type(error)), ConsumerTransaction(feed, db) as consumer:
        batch = consumer.claim(LIMIT)
        assert batch is not None
        found = batch.id, [change.id for change in consumer.changes()]
        raise error
    return found


@one_of_each
def test_a_kill_before_or_after_the_claim_of_a_half_changes_nothing(
    feed: Feed, make: Any, write: Any, db: str, connect: Connect
) -> None:
    connection = connect()
    work = fresh(feed, make, write, db, connection)
    whole, ids = fail_once(feed, db)
    keeper = connect()
    with keeper.transaction():
        ask(keeper, feed.lock())
        position = ask(keeper, feed.position())
        in_work = ask(connection, feed.in_work(position))
        with connection.transaction(force_rollback=True):
            half = ask(connection, feed.claim(position, N, None, 1, split=True))
        assert ask(connection, feed.in_work(position)) == in_work
        assert split_at(connection, feed) == []
        # A process that is killed after its claim stores no error.
        again = ask(connection, feed.claim(position, N, None, 1, split=True))
    assert (again["bounds"], again["count"]) == (half["bounds"], N // 2)
    assert split_at(connection, feed) == [whole]
    (row,) = consumers.status(connection)
    assert (str(row["batch_id"]), row["attempt"], str(row["part_of"])) == (again["id"], 1, whole)
    work.bad = {ids[5]}
    work.run_to_the_end()
    assert work.tries[0][:2] == (again["id"], 2)
    assert work.done == [each for each in ids if each not in work.bad]
    assert [letter.changes for letter in dead_letters.letters(connection)] == [1]


@one_of_each
def test_an_outage_never_halves_a_batch_and_does_not_count(
    feed: Feed, make: Any, write: Any, db: str, connect: Connect
) -> None:
    connection = connect()
    work = fresh(feed, make, write, db, connection)
    work.places = {0}
    for work.error in (psycopg.OperationalError("gone"), ServerUnavailable("gone"), ConnectionResetError()):
        with pytest.raises(type(work.error)):
            work.run()
    work.error = Poison("bad")
    work.run_to_the_end()
    whole, ids = work.tries[0][0], work.tries[0][2]
    assert [attempt for batch, attempt, _ in work.tries if batch == whole] == [1, 2, 3, 4, 5]
    assert work.done == ids[1:]
    write(connection)
    for _ in range(ATTEMPTS):
        whole, ids = fail_once(feed, db)
    # The whole batch has used up its attempts, and the outage comes while a half is processed.
    work.bad, work.tries, work.done, work.error = {ids[-1]}, [], [], ServerUnavailable("gone")
    for _ in range(3):
        with pytest.raises(ServerUnavailable):
            work.run()
    assert split_at(connection, feed)[-1] == whole
    assert {batch for batch, _, _ in work.tries[1:]} == {work.tries[-1][0]}
    work.error = Poison("bad")
    work.run_to_the_end()
    assert work.done == ids[:-1]
    assert [letter.changes for letter in dead_letters.letters(connection)] == [1, 1]


@each
@pytest.mark.release("the letter of a whole batch of commits is in every run")
def test_a_whole_batch_is_one_letter_where_that_is_asked_for(
    feed: Feed, make: Any, write: Any, db: str, connect: Connect
) -> None:
    connection = connect()
    work = fresh(feed, make, write, db, connection, on_give_up="dead_letter")
    work.places = {3}
    drained = work.run_to_the_end()
    assert work.done == []
    assert [letter.changes for letter in dead_letters.letters(connection)] == [N]
    assert (drained.splits, drained.extra_attempts, split_at(connection, feed)) == ((), 0, [])


FEED, MAKE, WRITE = FEEDS["commit"]
ONE_BY_ONE = {"feed": FEED, "make": MAKE, "write": WRITE}


def test_without_max_attempts_a_batch_is_tried_without_end(db: str, connect: Connect) -> None:
    work = fresh(db=db, connection=connect(), max_attempts=None, **ONE_BY_ONE)
    work.places = {3}
    for _ in range(5):
        with pytest.raises(Poison):
            work.run()
    assert [(attempt, len(ids)) for _, attempt, ids in work.tries] == [(n, N) for n in range(1, 6)]


def test_a_batch_whose_process_died_at_each_attempt_waits_for_a_person(db: str, connect: Connect) -> None:
    """The reason of the death is unknown: it may have been the machine."""
    connection = connect()
    work = fresh(db=db, connection=connection, **ONE_BY_ONE)
    for _ in range(ATTEMPTS):
        ask(connection, FEED.claim(ask(connection, FEED.position()), N, None, None))
    with pytest.raises(BatchGivenUp):
        work.run()
    assert dead_letters.letters(connection) == []


def test_if_ten_changes_of_a_batch_have_failed_alone_the_rest_waits_for_a_person(
    db: str, connect: Connect
) -> None:
    """An error in the code fails on each change. It must not empty the feed into dead letters."""
    connection = connect()
    work = fresh(db=db, connection=connection, max_attempts=1, limit=64, **ONE_BY_ONE)
    for _ in range(7):
        WRITE(connection)
    work.places = range(64)
    with pytest.raises(BatchGivenUp, match="airflow-pgchange skip"):
        work.run()
    letters = dead_letters.letters(connection)
    assert [letter.changes for letter in letters] == [1] * 10
    assert len(work.tries) <= 1 + 6 + 2 * 10
    # A person fixes the code and raises max_attempts. The rest is then processed in parts of the same batch.
    work.bad = set()
    work.plan = Plan(FEED, db, limit=64, max_batches=1, max_attempts=2)
    drained = work.run()
    assert (drained.splits, work.done) == ((work.tries[0][0],), work.tries[0][2][10:])


def test_a_commit_that_becomes_visible_after_its_neighbours_were_claimed_is_in_none_of_their_parts(
    db: str, connect: Connect
) -> None:
    """Its transaction is older than those of the batch. A batch that was chosen now would have it first."""
    connection, slow = connect(), connect(autocommit=False)
    late = commits.commits(slow)
    work = fresh(db=db, connection=connection, max_attempts=1, **ONE_BY_ONE)
    _, ids = fail_once(FEED, db)
    slow.commit()
    work.run()
    assert work.done == ids + late
    assert len(work.tries) == 3


def test_a_split_is_one_of_the_batches_of_a_run(db: str, connect: Connect) -> None:
    connection = connect()
    work = fresh(db=db, connection=connection, limit=N, max_attempts=1, max_batches=1, **ONE_BY_ONE)
    for places in ({2}, {N - 1}):
        WRITE(connection)
        work.places, work.bad, work.done = places, set(), []
        work.run()
        assert len(work.done) == N - 1


def test_a_consumer_that_was_moved_gets_whole_batches_again(db: str, connect: Connect) -> None:
    connection = connect()
    fresh(db=db, connection=connection, **ONE_BY_ONE)
    whole, _ = fail_once(FEED, db)
    with ConsumerTransaction(FEED, db) as consumer:
        half = consumer.claim(N, 1, split=True)
        assert half is not None
        assert half.parts_of == (whole,)
        consumer.ack()
    manual_operations.move_consumer(connection, connection, FEED, "beginning")
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(N)
        assert batch is not None
        assert (batch.parts_of, batch.count) == ((), N)
        consumer.ack()


def test_a_half_is_never_larger_than_a_batch_may_be(db: str, connect: Connect) -> None:
    work = fresh(db=db, connection=connect(), **ONE_BY_ONE)
    _, ids = fail_once(FEED, db)
    work.plan = Plan(FEED, db, limit=3, max_batches=None, max_attempts=1)
    work.run()
    assert [len(tried) for _, _, tried in work.tries] == [3, 1, 3, 1]
    assert work.done == ids


def test_parts_come_before_letters_that_were_sent_again_and_before_new_changes(
    db: str, connect: Connect
) -> None:
    connection = connect()
    work = fresh(db=db, connection=connection, max_attempts=1, **ONE_BY_ONE)
    _, first = fail_once(FEED, db)
    manual_operations.skip_batch(connection, connection, FEED, "no use")
    WRITE(connection)
    _, second = fail_once(FEED, db)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(N, 1, split=True)
        consumer.ack()
    dead_letters.redrive(connection, consumer=FEED.name)
    WRITE(connection)
    work.run()
    assert work.done[: N // 2 + N] == second[N // 2 :] + first
    assert len(work.done) == N // 2 + N + N


def test_where_results_are_elsewhere_the_bad_change_is_a_letter_there(
    db: str, other_db: str, connect: Connect, connect_to: Callable[[str], Connection]
) -> None:
    connection = connect()
    for n in (3, 4, 1):
        commits.commits(connection, n)
    work = Work(FEED, other_db, source=db)
    work.places = {4}
    work.run_to_the_end()
    assert work.done == [each for each in work.tries[0][2] if each not in work.bad]
    assert [letter.changes for letter in dead_letters.letters(connect_to(other_db))] == [1]
    assert len(work.tries) <= bound(1) + 2 * ATTEMPTS
