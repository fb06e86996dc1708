"""Dead letters of a group's feed: batches that were given up. Their events are kept even if the log is trimmed."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import LetterRefused
from airflow_pgchange.events import Event, publish, subscribe, topical, unsubscribe
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from airflow_pgchange.feeds.draining import Plan, drain
from tests.batches import taken
from tests.events import take

pytestmark = pytest.mark.usefixtures("few_sessions")

FEED = EventFeed("g")


@pytest.fixture
def connection(connect):
    connection = connect()
    subscribe(connection, "g", topical("t"))
    return connection


def numbers(start, stop):
    return [Event("t", {"n": n}) for n in range(start, stop)]


def given_up(db, results=None, **plan):
    """Claim the next batch once, and fail."""

    def fail(transaction, batch):
        raise ValueError("poison")

    asked = {"limit": 5000, "max_batches": 1, "max_attempts": 1, "on_give_up": "dead_letter", **plan}
    return drain(Plan(FEED, results or db, db, **asked), fail)


def work(db):
    changes = taken(FEED, db, limit=10_000)
    return [(change.data["payload"]["n"], change.data["metadata"]) for change in changes]


def test_a_batch_that_is_given_up_is_a_dead_letter_and_the_group_goes_on(db, connection):
    publish(connection, numbers(0, 3))
    assert len(given_up(db).letters) == 1
    publish(connection, numbers(3, 5))
    assert [n for n, _ in work(db)] == [3, 4]
    (letter,) = dead_letters.letters(connection)
    assert (letter.kind, letter.consumer, letter.changes, letter.attempts) == ("event", "events:g", 3, 1)
    assert letter.error == "ValueError: poison"
    assert letter.hindrance is None


def test_a_letter_that_is_sent_again_brings_its_events_to_its_group_alone_and_in_order(db, connection):
    subscribe(connection, "other")
    ids = publish(connection, numbers(0, 3), returning=True)
    given_up(db)
    assert len(take(connection, "other")) == 3
    (letter,) = dead_letters.letters(connection)
    connection.execute("delete from pgmb.events")
    dead_letters.redrive(connection, ids=[letter.id])
    assert dead_letters.letters(connection) == []
    assert work(db) == [(n, {"replay_of": ids[n]}) for n in range(3)]
    assert take(connection, "other") == []


def test_a_large_batch_is_a_letter_for_each_thousand(db, connection):
    publish(connection, numbers(0, 2500))
    given_up(db)
    found = dead_letters.letters(connection, consumer="events:g")
    assert [letter.changes for letter in found] == [1000, 1000, 500]
    dead_letters.redrive(connection, consumer="events:g")
    assert [n for n, _ in work(db)] == list(range(2500))


def test_very_large_events_are_a_letter_for_each_few_of_them(db, connection):
    publish(connection, [Event("t", {"n": n, "large": "x" * 5 * 2**20}) for n in range(4)])
    assert len(given_up(db).letters) == 1
    listed = dead_letters.letters(connection)
    assert len(listed) > 1
    assert sum(letter.changes for letter in listed) == 4
    dead_letters.redrive(connection, ids=[letter.id for letter in listed])
    assert [n for n, _ in work(db)] == [0, 1, 2, 3]


def test_a_letter_whose_group_has_no_subscription_any_more_stays_and_says_so(db, connection):
    publish(connection, numbers(0, 3))
    given_up(db)
    unsubscribe(connection, connection.execute("select id from pgmb.subscriptions").fetchone()[0])
    (letter,) = dead_letters.letters(connection)
    assert "no event can be sent to group g: its subscription" in letter.hindrance
    with pytest.raises(LetterRefused):
        dead_letters.redrive(connection, ids=[letter.id])
    assert len(dead_letters.letters(connection)) == 1


def test_a_letter_whose_subscription_goes_in_that_very_moment_is_sent_to_nobody(db, connection):
    subscribe(connection, "other")
    publish(connection, numbers(0, 3))
    given_up(db)
    assert len(take(connection, "other")) == 3
    (letter,) = dead_letters.letters(connection)
    connection.execute("delete from pgmb.subscriptions where group_id = 'g'")
    # The function that pgchange.redrive() calls after it has checked that the letter can be sent.
    with pytest.raises(psycopg.Error, match="no event can be sent to group g"):
        connection.execute("select pgmb.redrive(%s)", [letter.id])
    assert take(connection, "other") == []
    assert len(dead_letters.letters(connection)) == 1


def test_a_letter_in_another_database_than_its_events_says_that_it_cannot_be_sent(
    db, other_db, connection, connect_to
):
    publish(connection, numbers(0, 3))
    given_up(db, other_db)
    (letter,) = dead_letters.letters(connect_to(other_db))
    assert letter.changes == 3
    assert "in another database" in letter.hindrance


def test_dropping_a_group_drops_its_letters(db, connection):
    publish(connection, numbers(0, 3))
    given_up(db)
    connection.execute("select pgmb.drop_consumer('g')")
    assert dead_letters.letters(connection) == []


def test_a_batch_whose_cursor_is_in_another_database_is_not_skipped_here(db, other_db, connection):
    publish(connection, numbers(0, 3))
    with (
        pytest.raises(ZeroDivisionError),
        ConsumerTransaction(FEED, other_db, db) as consumer,
    ):
        consumer.claim(10)
        raise ZeroDivisionError
    with pytest.raises(psycopg.Error, match="in another database") as refused:
        connection.execute("select pgmb.skip_batch('g', 'no use')")
    assert "airflow-pgchange skip events:g" in refused.value.diag.message_hint


def test_events_of_a_key_are_erased_from_letters_and_the_others_come_again(db, connection):
    events = [
        Event("t", {"n": n, "customer": {"id": f"c{n}"}, "flat.id": n}, metadata={"by": f"u{n}"})
        for n in range(5)
    ]
    ids = publish(connection, events, returning=True)
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    for key, field in [(ids[0], None), ("c1", "customer.id"), ("2", "flat.id"), ("u3", "by")]:
        assert dead_letters.erase_letters(connection, key, field=field) == [
            dead_letters.ErasedLetter(letter.id, 1)
        ]
        assert dead_letters.erase_letters(connection, key, field=field) == []
    assert dead_letters.letters(connection)[0].changes == 1
    dead_letters.redrive(connection, ids=[letter.id])
    assert [n for n, _ in work(db)] == [4]
    # A letter without any remaining event is dropped.
    publish(connection, numbers(0, 2))
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    connection.execute(
        """update pgchange.letter set content = jsonb_set(content, '{events,1,payload,n}', '0')"""
    )
    assert dead_letters.erase_letters(connection, "0", field="n") == [dead_letters.ErasedLetter(letter.id, 2)]
    assert dead_letters.letters(connection) == []
