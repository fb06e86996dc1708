"""Behaviour that all kinds of feeds share, including a feed of another package."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.admin.health import explained, findings
from airflow_pgchange.errors import (
    BatchGivenUp,
    BatchNotFinished,
    ConsumerBusy,
    InvalidArgument,
    LetterRefused,
    SourceLostTail,
    StaleClaim,
    TransactionNotClean,
    UnknownConsumer,
    UnknownLetter,
)
from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    Feed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
    end_position,
    start_position,
    transaction,
)
from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.feed import Movable, lags
from airflow_pgchange.feeds.queries import ask, select
from tests import commits, queues, topology, tubes
from tests.acks import only_the_claimed_version_is_acked
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


MORE: dict[str, Callable[[Any], Any]] = {
    "commit": commits.commits,
    "event": lambda connection: publish(connection, "t"),
    "tube": lambda connection: connection.execute(
        "insert into public.item select max(id) + 1 from public.item"
    ),
    "queue": lambda connection: queues.post(connection, 1),
    "topology": lambda connection: connection.execute(
        "select topology.add_replicaset('r' || count(*) + 1) from topology._pico_replicaset"
    ),
    "diary": lambda connection: connection.execute("insert into diary.line (words) values ('more')"),
}
"""Writes one more change."""

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
each_movable = _of("commit", "event", "topology", "diary")
"""The feeds whose consumers can be moved, because their progress is a position that is kept with the results."""
each_note_of_a_move = _of("commit", "event")
"""A feed for each function that records a move. The event log has its own function."""
each_claim = _of("commit", "tube", "queue")
"""A feed for each implementation of claim. Commits, events, the topology and the diary share an implementation."""


@each
def test_a_claim_in_a_transaction_that_has_written_is_refused(
    feed: Feed, fill: Callable[[Any], Any], connect: Connect
) -> None:
    """A transaction that has written may not claim: its own changes, which others cannot read yet, could be in the
    batch. The claim would also be rolled back together with the work."""
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
    """A consumer transaction that ends without an ack, because its processing fails."""
    with pytest.raises(BatchNotFinished), ConsumerTransaction(feed, db) as consumer:
        yield consumer


@each
def test_each_attempt_is_shown_with_its_outcome_and_the_durations_of_its_phases(
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
    manual_operations.skip_batch(connection, connection, feed, "no use")
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
    manual_operations.skip_batch(connection, connection, feed, "no use")
    rows = connection.execute(
        "select attempt, skipped_at is not null, acked_at from pgchange.batches(%s)", [feed.name]
    ).fetchall()
    assert rows == [(1, True, None)]


@each
def test_a_batch_is_the_same_until_it_is_acked_though_more_has_come_and_each_change_comes_once(
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
        MORE[feed.kind](connection)
    (first, once, changes), again = tries
    assert again == (first, once + 1, changes)
    assert len(changes) == batch.count > 0
    assert all_of(feed, db)[: len(changes)] == changes
    assert all_of(feed, db) == []


def all_of(feed: Feed, db: str, source: str | None = None) -> list[Any]:
    """Process batch after batch, check that no change comes twice, and return the ids of all changes."""
    ids: list[Any] = []
    while True:
        with ConsumerTransaction(feed, db, source) as consumer:
            if consumer.claim(10) is None:
                assert len(set(ids)) == len(ids)
                return ids
            ids += [change.id for change in consumer.changes()]
            consumer.ack()


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
        left = lag(connection, connection, feed, 10)
        assert (left.ready == 0, left.ready_age is None) == (not fails, not fails)


@each
def test_changes_that_a_worker_has_claimed_go_to_no_other_worker(
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
    with (
        pytest.raises(BatchGivenUp, match=f"has failed.* airflow-pgchange skip {feed.name}"),
        ConsumerTransaction(feed, db) as consumer,
    ):
        consumer.claim(10, max_attempts=1)
    with pytest.raises(InvalidArgument, match="4,000 characters"):
        manual_operations.skip_batch(connection, connection, feed, "x" * 4001)
    manual_operations.skip_batch(connection, connection, feed, "cannot be read")
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
    """Give a batch up, and return the number of its dead letter."""
    with unfinished(feed, db) as consumer:
        consumer.claim(10)
    manual_operations.skip_batch(connection, connection, feed, "cannot be read")
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
        manual_operations.drop_consumer(connection, connection, feed)
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
    manual_operations.drop_consumer(results, catalogue, feed)
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
    """Return a lag with flags instead of its ages, because ages differ from one query to the next."""
    return {name: value is None if name.endswith("_age") else value for name, value in told.items()}


@each
def test_a_batch_that_fails_again_and_again_is_a_finding_until_it_is_given_up(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    for _ in range(3):
        with suppress(ZeroDivisionError), ConsumerTransaction(feed, db) as consumer:
            consumer.claim(10)
            raise ZeroDivisionError("no reason")
    (found,) = findings(connection, pytest.fail)
    assert (found.kind, found.severity, found.consumer) == (feed.kind, "error", feed.name)
    assert found.call == f"to give it up: airflow-pgchange skip {feed.name} --reason '...'"
    manual_operations.skip_batch(connection, connection, feed, "no use")
    assert [one for one in findings(connection, pytest.fail) if one.severity == "error"] == []


@each_movable
def test_moved_to_the_beginning_everything_comes_again_and_moved_to_now_only_what_is_new(
    feed: Movable, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    everything = all_of(feed, db)
    assert everything != []
    manual_operations.move_consumer(connection, connection, feed, "beginning")
    with unfinished(feed, db) as consumer:
        consumer.claim(10)
    manual_operations.move_consumer(connection, connection, feed, "now")
    assert all_of(feed, db) == []
    manual_operations.move_consumer(connection, connection, feed, "beginning")
    assert all_of(feed, db) == everything
    MORE[feed.kind](connection)
    assert len(all_of(feed, db)) == 1


@each_movable
def test_a_consumer_at_work_cannot_be_moved_and_one_that_was_moved_meanwhile_keeps_nothing(
    feed: Movable, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    with pytest.raises(StaleClaim), ConsumerTransaction(feed, db) as consumer:
        consumer.claim(10)
        with pytest.raises(ConsumerBusy, match="at work"):
            manual_operations.move_consumer(connection, connection, feed, "beginning")
        beginning = Jsonb(ask(connection, select(f"{feed.schema}.at", {})))
        assert ask(connection, select(f"{feed.schema}.put", *feed.parts, beginning, 7, None, None, None))
        consumer.ack(lambda results: results.execute("create table public.kept ()"))
    assert connection.execute("select to_regclass('public.kept')").fetchone() == (None,)


@_of("commit", "topology", "diary")
def test_a_consumer_that_is_dropped_begins_anew_without_its_letters(
    feed: Movable, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    given_up(feed, db, connection)
    manual_operations.drop_consumer(connection, connection, feed)
    assert consumers.status(connection) == dead_letters.letters(connection) == []
    assert all_of(feed, db) != []


@_of("topology", "diary")
def test_a_letter_is_void_where_its_consumer_was_moved_back_before_it(
    feed: Movable, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    letter = given_up(feed, db, connection)
    dead_letters.redrive(connection, ids=[letter])
    manual_operations.move_consumer(connection, connection, feed, "beginning")
    with pytest.raises(LetterRefused, match="moved back before it, so its changes come by themselves"):
        dead_letters.redrive(connection, ids=[letter])
    assert all_of(feed, db) != []
    assert all_of(feed, db) == []


@each_movable
def test_a_consumer_has_passed_a_point_once_it_has_processed_all_before_it(
    feed: Movable, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    MORE[feed.kind](connection)
    goal = end_position.point(connection, feed)
    with ConsumerTransaction(feed, db) as consumer:
        consumer.claim(1)
        consumer.ack()
    assert not end_position.has_passed(connection, connection, feed, goal)[0]
    all_of(feed, db)
    assert end_position.has_passed(connection, connection, feed, goal)[0]
    MORE[feed.kind](connection)
    assert not end_position.has_passed(connection, connection, feed, end_position.point(connection, feed))[0]


@each_movable
def test_a_source_that_lost_its_tail_is_told_and_its_consumer_goes_on_at_least_once(
    feed: Movable, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    everything = all_of(feed, db)
    connection.execute("delete from pgchange.claim")
    with (
        pytest.raises(SourceLostTail, match=f"airflow-pgchange repair {feed.name}"),
        ConsumerTransaction(feed, db) as consumer,
    ):
        consumer.claim(10)
    assert manual_operations.repair_consumer(connection, connection, feed) == "at least once"
    assert all_of(feed, db) == everything


@each_movable
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_batch_is_acked_as_the_version_that_was_claimed(
    feed: Movable, fill: Callable[[Any], Any], elsewhere: bool, db: str, other_db: str, connect_to: Any
) -> None:
    connection = connect_to(db)
    fill(connection)
    if elsewhere and feed.kind == "diary":
        _diary(connect_to(other_db))
    results, source = (other_db, db) if elsewhere else (db, None)
    only_the_claimed_version_is_acked(lambda: MORE[feed.kind](connection), feed, results, source)


def beginning(connection: Any, feed: Feed) -> Lag:
    """Return the lag of a new consumer."""
    ask(connection, feed.register())
    return lag(connection, connection, feed, 10)


def behind(connection: Any, feed: Feed, **as_if: Any) -> list[tuple[str, str]]:
    """Return the findings of health about a consumer, with a changed result of status()."""
    rows = [row | as_if for row in consumers.status(connection, warn=pytest.fail)]
    found = findings(connection, pytest.fail, rows)
    return [(one.severity, one.told) for one in found if one.consumer == feed.name]


@each
def test_a_consumer_that_is_further_behind_than_it_may_be_is_a_finding_that_says_why(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    assert beginning(connection, feed).ready > 0
    assert behind(connection, feed, oldest_seconds=3599) == []
    ((severity, told),) = behind(connection, feed, oldest_seconds=90 * 86400, ready=2, ready_exact=False)
    assert severity == "error"
    assert told.startswith("about 2 changes ready")
    assert ", the oldest for 90 days (limit: 01:00:00): no task " in told
    with suppress(ZeroDivisionError), ConsumerTransaction(feed, db) as consumer:
        consumer.claim(10)
        if feed.kind != "queue":  # Changes in work there are not ready for others.
            ((severity, told),) = behind(connect(), feed, oldest_seconds=3601)
            assert severity == "warning"
            assert ": a task is at work on it, on a batch claimed at " in told
        raise ZeroDivisionError("no reason")
    ((_, told),) = behind(connection, feed, oldest_seconds=3601)
    assert re.search(": attempt 1 at batch .* failed: ZeroDivisionError: no reason$", told)
    (row,) = explained(connection, connection, consumers.status(connection, warn=pytest.fail))
    assert told.endswith(f": {row['why']}")
    (row,) = explained(connection, connection, [row | {"ready": 0, "waiting": 0}])
    assert row["why"] is None


@each_claim
def test_how_far_a_consumer_may_be_behind_can_be_set(
    feed: Feed, fill: Callable[[Any], Any], connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    assert beginning(connection, feed).ready > 0
    limit = "select pgchange.limit_lag(%s, max_age => %s::interval, max_changes => %s)"
    connection.execute(limit, [feed.name, "2 hours", None])
    assert behind(connection, feed, oldest_seconds=7199) == []
    ((_, told),) = behind(connection, feed, oldest_seconds=7201)
    assert "(limit: 02:00:00)" in told
    connection.execute(limit, [feed.name, None, 100])
    assert behind(connection, feed, oldest_seconds=7201, ready=99, waiting=1, held_back_by=None) == []
    ((_, told),) = behind(connection, feed, oldest_seconds=1, ready=100, waiting=1, held_back_by=None)
    assert told.startswith("100 changes ready and 1 waiting, the oldest for 00:00:01 (limit: 100 changes): ")


WATCHED = """
    insert into pgchange.watcher (kind, feed, looked_at, woke_at)
    values (%s, %s, now() - %s::interval, now() - %s::interval)
    on conflict on constraint watcher_pkey do update set looked_at = excluded.looked_at, woke_at = excluded.woke_at
"""


@each_claim
def test_a_consumer_at_which_its_watcher_looks_no_more_is_a_finding_while_changes_are_ready(
    feed: Feed, fill: Callable[[Any], Any], connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    assert beginning(connection, feed).ready > 0
    connection.execute(
        "insert into pgchange.watcher (kind, feed, watched_by, looked_at) "
        "values (%s, %s, 'an_earlier_role', now() - interval '1 day')",
        [feed.kind, feed.name],
    )
    connection.execute(WATCHED, [feed.kind, feed.name, "9 minutes", "1 hour"])
    assert behind(connection, feed) == []
    ((_, told),) = behind(connection, feed, oldest_seconds=3601)
    assert ": its watcher looks, but no task claims the changes; it last woke a run at " in told
    connection.execute(WATCHED, [feed.kind, feed.name, "11 minutes", "1 hour"])
    ((severity, told),) = behind(connection, feed)
    assert severity == "error"
    assert ", and no watcher has looked at it since " in told
    assert behind(connection, feed, ready=0, waiting=0) == []
    # A sensor ends when it wakes its run, which makes progress.
    connection.execute(WATCHED, [feed.kind, feed.name, "11 minutes", "11 minutes"])
    progress = connection.execute("select now() - interval '10 minutes'").fetchone()
    assert behind(connection, feed, updated_at=progress[0]) == []


@each_movable
def test_a_new_consumer_starts_where_its_feed_says_and_only_once(
    feed: Any,
    fill: Callable[[Any], Any],
    db: str,
    other_db: str,
    connect_to: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A consumer that starts now gets later changes, and keeps this position when its batch fails. Its results are in
    another database than the changes."""
    connection, results = connect_to(db), other_db
    fill(connection)
    if feed.kind == "diary":
        _diary(connect_to(other_db))
    late = replace(feed, start="now")
    caplog.set_level(logging.INFO, start_position.__name__)
    assert all_of(late, results, db) == []
    assert f"{feed.name}: new consumer, starts at now: 0 changes" in caplog.text
    MORE[feed.kind](connection)
    with suppress(ZeroDivisionError), ConsumerTransaction(late, results, db) as consumer:
        batch = consumer.claim(10)
        assert batch is not None
        raise ZeroDivisionError
    MORE[feed.kind](connection)
    assert len(all_of(late, results, db)) > batch.count > 0
    assert len(caplog.records) == 1


@each_movable
def test_a_consumers_rights_are_enough_to_start(
    feed: Any, fill: Callable[[Any], Any], connect: Connect, role: Any
) -> None:
    """A consumer may choose its position only while it is new. To move it later takes an admin."""
    connection, consumer = connect(), role("consumer")
    fill(connection)
    connection.execute(f"select {feed.schema}.grant_consumer(%s::regrole)", [consumer.name])
    assert all_of(replace(feed, start="now"), consumer.conninfo) == []
    MORE[feed.kind](connection)
    point = ask(connection, feed.point_at(None))
    with psycopg.connect(consumer.conninfo, autocommit=True) as own:
        assert ask(own, feed.note_start(ask(own, feed.position()), point)) is None
        assert ask(own, feed.start_at(point, 7)) is False
    assert len(all_of(feed, consumer.conninfo)) > 0


@each_note_of_a_move
def test_a_consumer_is_registered_by_hand_once(
    feed: Any, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    connection = connect()
    fill(connection)
    if feed.kind != "event":  # A group is registered with its first subscription.
        manual_operations.register_consumer(connection, connection, feed, "now")
        assert all_of(replace(feed, start="beginning"), db) == []
    with pytest.raises(InvalidArgument, match=f"{feed.name} is registered already"):
        manual_operations.register_consumer(connection, connection, feed, "now")


def test_a_new_consumer_with_the_name_of_another_but_for_a_letter_is_told(
    db: str, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    commits.commits(connect(), 3)
    assert len(all_of(CommitFeed("balance", 0), db)) == 3
    caplog.set_level(logging.INFO, start_position.__name__)
    with ConsumerTransaction(CommitFeed("balnce", 0), db):
        pass
    assert caplog.messages == [
        "commits:balnce/0: new consumer, starts at the beginning: 3 changes. A consumer of a similar name exists: "
        "commits:balance/0"
    ]


@each_note_of_a_move
def test_a_consumer_that_has_claimed_is_not_new(
    feed: Any, fill: Callable[[Any], Any], db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first batch, which is claimed and not processed, stays complete. No attempt moves the consumer."""
    fill(connect())
    with unfinished(feed, db) as consumer:
        batch = consumer.claim(10)
        assert batch is not None
    monkeypatch.setattr(transaction, "start", lambda *_: pytest.fail("it has claimed"))
    assert len(all_of(replace(feed, start="now"), db)) >= batch.count


@each_note_of_a_move
def test_a_start_that_was_noted_and_not_taken_is_noted_again(
    feed: Any, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    """If the connection is lost between the two steps, the consumer starts later, and not at the beginning."""
    connection = connect()
    fill(connection)
    late = replace(feed, start="now")
    assert ask(connection, late.note_start({}, ask(connection, late.point_at(None)))) > 0
    assert all_of(late, db) == []


@_of("commit", "tube")
def test_an_unknown_consumer_is_refused_where_none_registers_by_itself(
    feed: Feed, fill: Callable[[Any], Any], db: str, connect: Connect
) -> None:
    fill(connect())
    is_there = ask(connect(), feed.position()) is not None
    refused = nullcontext() if is_there else pytest.raises(UnknownConsumer, match="airflow-pgchange register")
    with refused, ConsumerTransaction(feed, db, register=False) as consumer:
        assert consumer.claim(10) is None or consumer.ack() is None
    assert (ask(connect(), feed.position()) is not None) is is_there
