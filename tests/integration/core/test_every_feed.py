"""What is the same for the consumers of every kind of feed, and of one that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from airflow_pgchange.admin import by_hand, consumers, dead_letters
from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    Feed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.feeds.errors import (
    BatchGivenUp,
    BatchNotFinished,
    ConsumerBusy,
    InvalidArgument,
    LetterRefused,
    TransactionNotClean,
    UnknownConsumer,
    UnknownLetter,
    translated,
)
from airflow_pgchange.feeds.feed import Movable, lags
from airflow_pgchange.feeds.lag import lag
from airflow_pgchange.feeds.queries import ask
from tests import commits, queues, topology, tubes
from tests.events import publish, subscribe
from tests.ledger import Connect
from tests.sixth_feed.diary import DiaryFeed
from tests.waiting import until, waits

pytestmark = pytest.mark.usefixtures("few_sessions")

DIARY = Path(__file__).parents[2] / "sixth_feed" / "diary.sql"


def _events(connection: Any) -> None:
    subscribe(connection, "g")
    publish(connection, "t")


def _tube(connection: Any) -> None:
    tubes.make(connection, "q")
    connection.execute("create table public.item (id bigint primary key)")
    tubes.attach(connection)
    connection.execute("insert into public.item values (1)")


def _queue(connection: Any) -> None:
    queues.make(connection)
    queues.post(connection, 1)


def _diary(connection: Any) -> None:
    with connection.transaction():
        connection.execute(DIARY.read_bytes(), prepare=False)
    connection.execute("insert into diary.line (words) values ('one')")


FEEDS: dict[str, tuple[Feed, Callable[[Any], Any]]] = {
    "commit": (CommitFeed("c", 0), commits.commits),
    "event": (EventFeed("g"), _events),
    "tube": (TubeFeed("q"), _tube),
    "queue": (QueueFeed("q"), _queue),
    "topology": (TopologyFeed("c"), topology.make_catalogue),
    "diary": (DiaryFeed("ann"), _diary),
}


def _of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("feed", "fill"),
        [
            pytest.param(*FEEDS[name], id=name, marks=[pytest.mark.hstore] if name == "queue" else [])
            for name in names
        ],
    )


each = _of(*FEEDS)
each_claim = _of("commit", "tube", "queue")
"""The feeds whose claims and letters have SQL of their own: ``pgchange.offer`` gives the others that of commits."""


@each
def test_a_claim_in_a_transaction_that_has_written_is_refused(
    feed: Feed, fill: Callable[[Any], Any], connect: Connect
) -> None:
    """What it wrote may be among the changes, which nobody else can read yet, and a claim that ends with the work's
    transaction is no record of it."""
    connection, keeper = connect(), connect(autocommit=False)
    fill(connection)
    ask(connection, feed.register())
    connection.execute("create table public.other (n integer)")
    assert ask(keeper, feed.lock())
    position = ask(keeper, feed.position())
    with pytest.raises(TransactionNotClean, match="already written"), translated(), connection.transaction():
        connection.execute("insert into public.other values (1)")
        ask(connection, feed.claim(position, 10, None, None))
    with translated(), connection.transaction():
        assert ask(connection, feed.claim(position, 10, None, None))["count"] > 0


@each
def test_a_consumer_transaction_that_has_written_claims_nothing(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    connection.execute("create table public.other (n integer)")
    with pytest.raises(TransactionNotClean), ConsumerTransaction(feed, db) as consumer:
        consumer.connection.execute("insert into public.other values (1)")
        consumer.claim(10)


@contextmanager
def unfinished(feed: Feed, db: str) -> Iterator[ConsumerTransaction]:
    """A consumer's transaction that ends before its ack."""
    with pytest.raises(BatchNotFinished), ConsumerTransaction(feed, db) as consumer:
        yield consumer


@each
def test_what_became_of_each_attempt_is_shown_with_how_long_its_phases_took(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    with suppress(ZeroDivisionError), ConsumerTransaction(feed, db) as consumer:
        consumer.claim(10)
        raise ZeroDivisionError("no reason")
    with ConsumerTransaction(feed, db) as consumer:
        batch = consumer.claim(10)
        consumer.ack()
    assert batch is not None
    rows = connection.execute(
        """
        select kind, attempt, count, batch_id::text, claimed_at is not null, error, failed_at is not null,
               acked_at is not null, array(select jsonb_object_keys(seconds) order by 1)
        from pgchange.batches(%s) order by noted_at
        """,
        [feed.name],
    ).fetchall()
    same, phases = (batch.count, batch.id, True), ["claim", "process"]
    assert rows == [
        (feed.kind, 1, *same, "ZeroDivisionError: no reason", True, False, phases),
        (feed.kind, 2, *same, None, False, True, phases),
    ]


@each_claim
def test_an_error_that_arrives_late_is_not_written_on_the_next_attempt(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    """A task that lost its connection may report its error after another task has claimed the batch."""
    connection = connect()
    fill(connection)
    attempts = []
    for n in (1, 2):
        with suppress(ZeroDivisionError), ConsumerTransaction(feed, db) as consumer:
            attempts.append(consumer.claim(10))
            raise ZeroDivisionError(f"attempt {n}")
    assert [batch.attempt for batch in attempts if batch] == [1, 2]
    ask(connection, feed.note_failure(attempts[0], "the late error of attempt 1"))
    by_hand.skip_batch(connection, connection, feed, "no use")
    (letter,) = dead_letters.letters(connection)
    assert letter.error == "ZeroDivisionError: attempt 2"


@each
def test_a_batch_that_is_given_up_is_shown_as_skipped(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    with unfinished(feed, db) as consumer:
        consumer.claim(10)
    by_hand.skip_batch(connection, connection, feed, "no use")
    rows = connection.execute(
        "select attempt, skipped_at is not null, acked_at from pgchange.batches(%s)", [feed.name]
    ).fetchall()
    assert rows == [(1, True, None)]


@each
def test_a_batch_is_the_same_until_it_is_acked_and_then_is_gone(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    tries = []
    for _ in range(2):
        with unfinished(feed, db) as consumer:
            batch = consumer.claim(10)
            assert batch is not None
            tries.append((batch.id, batch.attempt, [change.id for change in consumer.changes()]))
    (first, once, changes), again = tries
    assert again == (first, once + 1, changes)
    assert len(changes) == batch.count > 0
    with ConsumerTransaction(feed, db) as consumer:
        consumer.claim(10)
        consumer.ack()
    with ConsumerTransaction(feed, db) as consumer:
        assert consumer.claim(10) is None


@each
def test_results_and_progress_are_kept_together_or_not_at_all(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    connection.execute("create table public.result (batch uuid)")

    def write(results: Any) -> None:
        results.execute("insert into public.result values (%s)", [batch.id])
        if fails:
            raise ValueError("not yet")

    for fails in (True, False):
        fault = pytest.raises(ValueError, match="not yet") if fails else nullcontext()
        with fault, ConsumerTransaction(feed, db) as consumer:
            batch = consumer.claim(10)
            assert batch is not None
            consumer.ack(write)
        kept = connection.execute("select count(*) from public.result").fetchone()
        assert kept == (0 if fails else 1,)
        assert (lag(connection, connection, feed, 10).ready == 0) is not fails


@each
def test_what_one_has_claimed_nobody_else_gets(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    fill(connect())
    with unfinished(feed, db) as consumer:
        assert consumer.claim(10) is not None
        with suppress(ConsumerBusy), ConsumerTransaction(feed, db) as other:
            assert other.claim(10) is None


@each
def test_a_batch_that_is_given_up_is_a_letter_until_it_is_sent_again(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    with unfinished(feed, db) as consumer:
        batch = consumer.claim(10)
        assert batch is not None
    with pytest.raises(BatchGivenUp, match="has failed"), ConsumerTransaction(feed, db) as consumer:
        consumer.claim(10, max_attempts=1)
    with pytest.raises(InvalidArgument, match="4,000 characters"):
        by_hand.skip_batch(connection, connection, feed, "x" * 4001)
    by_hand.skip_batch(connection, connection, feed, "cannot be read")
    (letter,) = dead_letters.letters(connection)
    assert (letter.consumer, letter.changes, letter.reason) == (feed.name, batch.count, "cannot be read")
    assert dead_letters.redrive(connection, ids=[letter.id]) == [letter.id]
    with ConsumerTransaction(feed, db) as consumer:
        again = consumer.claim(10)
        assert again is not None
        assert again.count == batch.count
        consumer.ack()
    assert dead_letters.letters(connection) == []


def given_up(feed: Feed, db: str, connection: Any) -> int:
    """The number of the letter of a batch that a person gave up."""
    with unfinished(feed, db) as consumer:
        consumer.claim(10)
    by_hand.skip_batch(connection, connection, feed, "cannot be read")
    (letter,) = dead_letters.letters(connection)
    return letter.id


@each_claim
def test_a_letter_is_sent_once_however_many_ask_at_once(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection, first, second = connect(), connect(autocommit=False), connect()
    fill(connection)
    letter = given_up(feed, db, connection)
    first.execute("select pgchange.redrive(%s)", [letter])
    with ThreadPoolExecutor() as pool, first:
        asked = pool.submit(dead_letters.redrive, second, ids=[letter])
        until(connection, waits(second, behind=first))
    with pytest.raises((LetterRefused, UnknownLetter)):
        asked.result()


def test_a_letter_that_another_session_sends_meanwhile_is_passed_over_by_a_choice_of_letters(
    db: str, connect: Connect
) -> None:
    connection, first, second = connect(), connect(autocommit=False), connect()
    feed, fill = FEEDS["commit"]
    fill(connection)
    letter = given_up(feed, db, connection)
    first.execute("select pgchange.redrive(%s)", [letter])
    choice = "select pgchange.redrive(of_consumer => %s)"
    with ThreadPoolExecutor() as pool, first:
        asked = pool.submit(second.execute, choice, [feed.name])
        until(connection, waits(second, behind=first))
    assert asked.result().fetchall() == []


@each
def test_status_tells_which_batch_was_claimed_and_not_acked(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    with unfinished(feed, db) as consumer:
        batch = consumer.claim(10)
        assert batch is not None
    (row,) = [one for one in consumers.status(connection) if one["consumer"] == feed.name]
    assert (row["kind"], row["at_work"], row["attempt"]) == (feed.kind, False, 1)
    assert str(row["batch_id"]) == str(batch.id)


OURS = [feed for feed, _ in FEEDS.values() if isinstance(feed, Movable) and feed.kind != "diary"]


@pytest.mark.parametrize("feed", OURS, ids=lambda feed: feed.kind)
def test_a_consumer_that_nobody_knows_is_not_dropped_but_named_with_where_the_others_are(
    feed: Movable, connect: Connect
) -> None:
    connection = connect()
    with pytest.raises(UnknownConsumer, match="there is no (consumer|group)") as told:
        by_hand.drop_consumer(connection, connection, feed)
    assert (feed.name.split("/")[0].split(":")[-1]) in str(told.value)
    assert "lists them" in str(told.value)


def test_the_claim_of_a_consumer_of_the_topology_whose_progress_is_elsewhere_is_dropped(
    connect: Connect, db: str, other_db: str, connect_to: Any
) -> None:
    catalogue, results = connect(), connect_to(other_db)
    topology.make_catalogue(catalogue)
    feed = TopologyFeed("c")
    with ConsumerTransaction(feed, other_db, source=db) as consumer:
        consumer.claim(10)
        consumer.ack()
    by_hand.drop_consumer(results, catalogue, feed)
    assert catalogue.execute("select from pgchange.claim").fetchall() == []


@each
def test_many_are_asked_at_once_what_each_is_asked_alone(
    feed: Feed, fill: Callable[[Any], Any], connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    ask(connection, feed.register())
    at = ask(connection, feed.position())
    asked = [(feed, at, upto) for upto in (0, 1, 5)]
    together = [timeless(told) for told in ask(connection, lags(asked))]
    assert together == [timeless(ask(connection, feed.lag(at, upto))) for feed, at, upto in asked]
    assert together[1]["ready"] > 0


def timeless(told: dict[str, Any]) -> dict[str, Any]:
    """A lag without its ages, which differ from one question to the next, but with whether there are any."""
    return {name: value is None if name.endswith("_age") else value for name, value in told.items()}
