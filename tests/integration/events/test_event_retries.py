"""Events on which a handler fails are retried for this handler only, and become a dead letter after the last try."""

from __future__ import annotations

import sys

import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import HandlerFailed
from airflow_pgchange.events import Event, Handler, Selection, publish, subscribe, topical, unsubscribe
from tests.handling import LATER, Seen, failing, group, hurry, numbered, run_with_retries, subscribed, unread

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def connection(connect):
    return subscribed(connect())


def test_a_failed_call_is_tried_again_by_itself_and_the_others_are_left_alone(db, connection):
    good, bad = Seen(), Seen(failing(2))
    publish(connection, numbered(0, 5))
    handlers = group(db, Handler("good", good), Handler("bad", bad, retries=(LATER, LATER)))
    run_with_retries(handlers, connection)
    assert good.numbers == list(range(5))
    assert bad.attempts == [3]
    assert bad.numbers == list(range(5))
    assert dead_letters.letters(connection) == []


def test_a_retry_is_an_event_as_everybody_knows_them(db, connection):
    ids = publish(connection, numbered(0, 3), returning=True)
    group(db, Handler("bad", failing(1), retries=(LATER,))).run("empty")
    row = connection.execute(
        "select payload, subscription_id is not null, "
        "extract(epoch from pgmb.extract_date_from_event_id(id) - now()) between 3500 and 3600 "
        "from pgmb.events where topic = 'pgmb-retry'"
    ).fetchone()
    assert row == ({"ids": ids, "retryNumber": 1, "handlerName": "bad"}, True, True)
    assert connection.execute("select count(*) from pgmb.scheduled").fetchone() == (1,)


def test_a_retry_that_another_client_published_is_handled(db, connection):
    """Such a retry has no copies of the events, so the events are read from the log."""
    first, other = Seen(), Seen()
    handlers = group(db, Handler("a", first), Handler("b", other))
    ids = publish(connection, numbered(0, 3), returning=True)
    handlers.run("empty")
    sid = connection.execute("select id from pgmb.subscriptions").fetchone()[0]
    payload = {"ids": ids[1:], "retryNumber": 4, "handlerName": "a"}
    publish(connection, Event("pgmb-retry", payload, subscription_id=sid))
    handlers.run("empty")
    assert first.numbers == [0, 1, 2, 1, 2]
    assert first.attempts == [1, 5]
    assert other.numbers == [0, 1, 2]


def test_a_retry_finds_its_events_when_the_log_has_let_go_of_them(db, connection):
    seen = Seen(failing(1))
    publish(connection, numbered(0, 3))
    handlers = group(db, Handler("a", seen, retries=(LATER,)))
    handlers.run("empty")
    connection.execute("delete from pgmb.events where topic = 't'")
    assert hurry(connection) == 1
    handlers.run("empty")
    assert seen.numbers == [0, 1, 2]


def test_after_the_last_try_the_events_and_their_error_are_a_dead_letter(db, connection):
    publish(connection, numbered(0, 3))
    handlers = group(db, Handler("bad", failing(99), retries=(LATER,)))
    run_with_retries(handlers, connection)
    (letter,) = dead_letters.letters(connection)
    assert (letter.kind, letter.consumer, letter.changes, letter.attempts) == (
        "event",
        "events:g/bad",
        3,
        2,
    )
    assert letter.error == "ValueError: poison"
    assert unread(connection) == []


def test_a_dead_letter_that_is_sent_again_goes_to_its_handler_alone(db, connection):
    publish(connection, numbered(0, 3))
    mended, other = Seen(failing(1)), Seen()
    handlers = group(db, Handler("bad", mended, retries=()), Handler("other", other))
    handlers.run("empty")
    (letter,) = dead_letters.letters(connection)
    assert letter.hindrance is None
    connection.execute("delete from pgmb.events")
    dead_letters.redrive(connection, ids=[letter.id])
    assert dead_letters.letters(connection) == []
    handlers.run("empty")
    assert mended.numbers == other.numbers == [0, 1, 2]
    assert mended.attempts == [1]


def test_a_dead_letter_whose_subscription_is_gone_says_so_and_stays(db, connection):
    publish(connection, numbered(0, 3))
    group(db, Handler("bad", failing(1), retries=())).run("empty")
    unsubscribe(connection, connection.execute("select id from pgmb.subscriptions").fetchone()[0])
    (letter,) = dead_letters.letters(connection)
    assert "subscriptions are gone" in letter.hindrance


def test_a_password_in_an_error_does_not_reach_the_dead_letter(db, connection):
    publish(connection, numbered(0, 1))

    def fail(delivery):
        raise ValueError("cannot reach postgres://me:hunter2@host/db")

    group(db, Handler("bad", fail, retries=())).run("empty")
    (letter,) = dead_letters.letters(connection)
    assert "hunter2" not in letter.error
    assert "cannot reach" in letter.error


def test_a_retry_for_a_handler_that_does_not_exist_becomes_a_dead_letter(db, connection):
    ids = publish(connection, numbered(0, 3), returning=True)
    sid = connection.execute("select id from pgmb.subscriptions").fetchone()[0]
    payload = {"ids": ids, "retryNumber": 1, "handlerName": "old"}
    publish(connection, Event("pgmb-retry", payload, subscription_id=sid))
    group(db, Handler("new", Seen())).run("empty")
    (letter,) = dead_letters.letters(connection)
    assert (letter.consumer, letter.changes) == ("events:g/old", 3)
    assert "no handler of this name" in letter.error


def test_a_retry_for_no_handler_becomes_one_dead_letter_however_often_its_batch_comes(db, connection):
    ids = publish(connection, numbered(0, 1), returning=True)
    sid = connection.execute("select id from pgmb.subscriptions").fetchone()[0]
    payload = {"ids": ids, "retryNumber": 1, "handlerName": "old"}
    publish(connection, Event("pgmb-retry", payload, subscription_id=sid))
    for _ in range(2):
        with pytest.raises(HandlerFailed):
            group(db, Handler("strict", failing(1), retries=None)).run("empty")
    done = group(db, Handler("strict", Seen(), retries=None)).run("empty")
    assert (done.given_up, len(dead_letters.letters(connection)), unread(connection)) == (1, 1, [])


def test_a_retry_that_says_nothing_useful_is_a_dead_letter(db, connection):
    sid = connection.execute("select id from pgmb.subscriptions").fetchone()[0]
    publish(connection, Event("pgmb-retry", {"ids": "all"}, subscription_id=sid))
    done = group(db, Handler("a", Seen())).run("empty")
    assert done.given_up == 1
    assert "ids, retryNumber and handlerName" in dead_letters.letters(connection)[0].error


@pytest.mark.parametrize(
    ("payload", "metadata"),
    [
        ({"ids": [1, {}], "retryNumber": 1, "handlerName": "a"}, {}),
        ({"ids": [], "retryNumber": 1, "handlerName": "gone"}, {}),
        ({"ids": ["x"], "retryNumber": -10, "handlerName": "a"}, {}),
        ({"ids": ["x"], "retryNumber": 10**30, "handlerName": "a"}, {}),
        ({"ids": ["x"], "retryNumber": 1, "handlerName": "a"}, {"events": "x"}),
        ({"ids": ["x"], "retryNumber": 1, "handlerName": "a"}, {"events": [{"id": 5}]}),
        (
            {"ids": ["x"], "retryNumber": 1, "handlerName": "a"},
            {"events": [{"id": None, "topic": "", "payload": 1}]},
        ),
    ],
)
def test_a_retry_that_nobody_can_read_is_a_dead_letter_and_stops_no_handler(
    db, connection, payload, metadata
):
    seen = Seen()
    sid = connection.execute("select id from pgmb.subscriptions").fetchone()[0]
    publish(connection, Event("pgmb-retry", payload, metadata, subscription_id=sid))
    publish(connection, numbered(7, 8))
    assert group(db, Handler("a", seen)).run("empty").given_up == 1
    assert seen.numbers == [7]
    assert len(dead_letters.letters(connection)) == 1


def test_a_retry_comes_by_a_subscription_of_its_handler(db, connection):
    """Another subscription through which the event came may be gone at the time of the retry."""
    subscribe(connection, "g")
    other, own = (
        row[0] for row in connection.execute("select id from pgmb.subscriptions order by id").fetchall()
    )
    seen = Seen(failing(1))
    handlers = group(db, Handler("a", seen, retries=(LATER,), subscriptions=[own]))
    publish(connection, numbered(0, 1))
    handlers.run("empty")
    unsubscribe(connection, other)
    assert hurry(connection) == 1
    handlers.run("empty")
    assert seen.numbers == [0]


def test_an_event_that_has_no_key_is_a_dead_letter_and_stops_no_other(db, connection):
    publish(connection, [Event("t", {"n": 0, "k": 1}), Event("t", {"n": 1}), Event("t", {"n": 2, "k": [1]})])
    publish(connection, numbered(3, 4, k=2))
    seen = Seen()
    handler = Handler("a", seen, retries=(), key=lambda event: event.payload["k"])
    assert group(db, handler).run("empty").given_up == 2
    assert sorted(seen.numbers) == [0, 3]
    # The threads decide the order in which the events are given up. But each has its own error.
    sent_again = {}
    for letter in dead_letters.letters(connection):
        dead_letters.redrive(connection, ids=[letter.id])
        group(db, Handler("a", again := Seen())).run("empty")
        sent_again[letter.error.partition(":")[0]] = again.numbers
    assert sent_again == {"KeyError": [1], "TypeError": [2]}


@pytest.mark.parametrize("number", ["1e5000", "-1e5000", f"{10**400}.5"])
def test_a_number_that_python_cannot_read_stops_no_handler(db, connection, number):
    """PostgreSQL accepts such a number in JSON, and every role that may publish by SQL can send it."""
    connection.execute(
        "insert into pgmb.events (topic, payload) values ('t', %s::jsonb)",
        [f'{{"n": 1, "beyond": [{number}]}}'],
    )
    beyond = []

    def note(delivery):
        beyond.append(delivery.events[0].payload["beyond"][0])

    seen = Seen(failing(2))
    handlers = group(db, Handler("note", note), Handler("a", seen, retries=(LATER,)))
    run_with_retries(handlers, connection)
    dead_letters.redrive(connection, consumer="events:g/a")
    handlers.run("empty")
    assert beyond == [float(number)]
    assert seen.numbers == [1]
    assert abs(seen.deliveries[0].events[0].payload["beyond"][0]) > sys.float_info.max


def test_very_large_events_are_given_up_in_portions(db, connection):
    publish(connection, numbered(0, 3, large="x" * 5 * 2**20))
    group(db, Handler("bad", failing(1), retries=())).run("empty")
    assert [letter.changes for letter in dead_letters.letters(connection)] == [1, 1, 1]


@pytest.fixture
def two(connect):
    """A connection, and the second of two subscriptions of a group to topics t and u. Both topics have events."""
    connection = connect()
    subscribe(connection, "g", topical("t"))
    second = subscribe(connection, "g", topical("u"))
    publish(connection, [*numbered(0, 2, "u"), *numbered(2, 5)])
    return connection, second


def test_a_retry_comes_by_its_subscription_although_another_was_removed(db, two):
    connection, ended = two
    seen = Seen(failing(1))
    handlers = group(db, Handler("a", seen, retries=(LATER,)))
    handlers.run("empty")
    unsubscribe(connection, ended)
    hurry(connection)
    handlers.run("empty")
    assert seen.numbers == [2, 3, 4]


def test_a_letter_of_one_subscription_is_sent_again_when_another_is_ended(db, two):
    connection, ended = two
    group(db, Handler("a", failing(1), retries=())).run("empty")
    unsubscribe(connection, ended)
    sent = dead_letters.redrive(connection, consumer="events:g/a")
    seen = Seen()
    group(db, Handler("a", seen)).run("empty")
    assert (len(sent), seen.numbers) == (1, [2, 3, 4])


def test_retried_events_keep_their_order_whatever_subscriptions_they_came_by(db, connect):
    connection = connect()
    subscribe(connection, "g", topical(["t", "u"]))
    subscribe(connection, "g", topical("t"))
    publish(connection, [*numbered(0, 1), *numbered(1, 2, "u"), *numbered(2, 3)])
    seen = Seen(failing(1))
    handlers = group(db, Handler("a", seen, retries=(LATER,), key=lambda event: 0))
    handlers.run("empty")
    assert hurry(connection) == 1
    handlers.run("empty")
    assert seen.numbers == [0, 1, 2]


@pytest.fixture
def both(connect):
    """A connection, and the ids of two subscriptions of a group, in order. One event was dispatched to both."""
    connection = connect()
    ids = [
        subscribe(connection, "g", topical("t")),
        subscribe(connection, "g", Selection("e.payload is not null")),
    ]
    publish(connection, numbered(0, 1))
    connection.execute("select pgmb.poll_for_events()")
    return connection, sorted(ids)


@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("tried_before", [0, 1])
def test_a_retry_comes_while_one_of_its_subscriptions_exists(db, both, ended, tried_before):
    connection, ids = both
    handlers = group(db, Handler("a", failing(99), retries=(LATER, LATER)))
    for _ in range(tried_before):
        handlers.run("empty")
        assert hurry(connection) == 1
        connection.execute("select pgmb.poll_for_events()")
    unsubscribe(connection, ids[ended])
    run_with_retries(handlers, connection)
    (letter,) = dead_letters.letters(connection)
    assert (letter.attempts, letter.hindrance) == (3, None)


def test_a_letter_of_what_several_subscriptions_want_is_sent_again_while_one_of_them_is_there(db, both):
    connection, ids = both
    group(db, Handler("a", failing(1), retries=())).run("empty")
    unsubscribe(connection, ids[0])
    assert len(dead_letters.redrive(connection, consumer="events:g/a")) == 1
    seen = Seen()
    group(db, Handler("a", seen)).run("empty")
    assert (seen.numbers, seen.deliveries[0].events[0].subscriptions) == ([0], tuple(ids))


def test_events_whose_subscriptions_were_removed_become_a_dead_letter_at_once(db, both):
    connection, ids = both
    for sid in ids:
        unsubscribe(connection, sid)
    done = group(db, Handler("a", failing(99), retries=(0,))).run("empty")
    (letter,) = dead_letters.letters(connection)
    assert (done.retried, done.given_up, letter.attempts) == (0, 1, 1)
    assert "subscriptions are gone" in letter.hindrance
