"""Dead letters of a catalogue's log: batches that were given up, and come again to their consumer alone."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import HistoryTrimmed, StaleClaim
from airflow_pgchange.feeds import ConsumerTransaction, TopologyFeed
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.draining import Plan, drain
from tests.batches import taken

FEED = TopologyFeed("router")
FIRST = ["1/1", "1/2", "1/3"]


@pytest.fixture
def catalogue(connect):
    connection = connect()
    connection.execute("select topology.add_replicaset('r1', uuid => 'ur1')")
    connection.execute("select topology.add_instance('i1', 'r1', 'h:1', uuid => 'ui1')")
    connection.execute("select topology.add_instance('i2', 'r1', 'h:2', uuid => 'ui2')")
    return connection


def given_up(db, results=None):
    """Claim the next batch once and fail. Return its dead letter."""

    def fail(transaction, batch):
        raise ValueError("poison")

    asked = {"limit": 5000, "max_batches": 1, "max_attempts": 1, "on_give_up": "dead_letter"}
    (letter,) = drain(Plan(FEED, results or db, db, **asked), fail).letters
    return letter


def work(db, source=None):
    return [change.id for change in taken(FEED, db, source)]


def test_a_batch_that_is_given_up_is_a_dead_letter_and_the_consumer_goes_on(db, catalogue):
    given_up(db)
    catalogue.execute("select topology.set_master('r1', 'i1')")
    assert work(db) == ["1/4"]
    (letter,) = dead_letters.letters(catalogue)
    assert (letter.kind, letter.consumer, letter.changes, letter.attempts) == (
        "topology",
        "topology:router",
        3,
        1,
    )
    assert (letter.error, letter.hindrance) == ("ValueError: poison", None)


def test_a_letter_that_is_sent_again_comes_once_as_the_same_batch(db, catalogue):
    given_up(db)
    catalogue.execute("select topology.set_master('r1', 'i1')")
    (letter,) = dead_letters.letters(catalogue)
    assert dead_letters.redrive(catalogue, ids=[letter.id]) == [letter.id]
    assert lag(catalogue, catalogue, FEED, 10).ready == 4
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(1000).id == str(letter.batch_id)
        assert [change.id for change in consumer.changes()] == FIRST
        consumer.ack()
    assert dead_letters.letters(catalogue) == []
    assert [work(db), work(db)] == [["1/4"], []]


def test_a_letter_waits_for_the_batch_in_work(db, catalogue):
    given_up(db)
    catalogue.execute("select topology.set_master('r1', 'i1')")
    with pytest.raises(RuntimeError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        raise RuntimeError
    dead_letters.redrive(catalogue, consumer=FEED.name)
    assert [work(db), work(db), work(db)] == [["1/4"], FIRST, []]


def test_a_letter_that_fails_again_is_the_same_letter(db, catalogue):
    letter = given_up(db)
    dead_letters.redrive(catalogue, ids=[letter])
    assert given_up(db) == letter
    (listed,) = dead_letters.letters(catalogue)
    assert (listed.attempts, listed.on_its_way) == (2, False)
    assert work(db) == []


def test_a_letter_that_was_dropped_while_its_batch_was_in_work_leaves_nothing(db, catalogue):
    letter = given_up(db)
    dead_letters.redrive(catalogue, ids=[letter])
    with pytest.raises(StaleClaim, match="was dropped"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        dead_letters.drop_letters(catalogue, ids=[letter])
        consumer.ack(lambda connection: connection.execute("create table kept ()"))
    assert catalogue.execute("select to_regclass('kept')").fetchone() == (None,)
    assert work(db) == []


def test_a_letter_whose_events_were_trimmed_can_only_be_dropped(db, catalogue):
    letter = given_up(db)
    catalogue.execute("update topology.log set written_at = now() - interval '1 day'")
    catalogue.execute("select topology.trim_log('1 hour')")
    assert "were trimmed" in dead_letters.letters(catalogue)[0].hindrance
    with pytest.raises(HistoryTrimmed):
        dead_letters.redrive(catalogue, ids=[letter])


def test_a_letter_on_its_way_keeps_its_events(db, catalogue):
    dead_letters.redrive(catalogue, ids=[given_up(db)])
    catalogue.execute("update topology.log set written_at = now() - interval '1 day'")
    assert catalogue.execute("select topology.trim_log('1 hour')").fetchone() == (None,)
    assert work(db) == FIRST


def test_a_letter_may_lie_in_another_database_than_the_log(db, catalogue, other_db, connect_to):
    results = connect_to(other_db)
    letter = given_up(db, results=other_db)
    assert dead_letters.redrive(results, catalogue, ids=[letter]) == [letter]
    assert [work(other_db, db), work(other_db, db)] == [FIRST, []]


def test_a_person_may_give_up_what_is_in_work(db, catalogue):
    with pytest.raises(RuntimeError), ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(1000)
        raise RuntimeError
    assert manual_operations.skip_batch(catalogue, catalogue, FEED, "poison") == str(batch.id)
    assert work(db) == []
    assert dead_letters.letters(catalogue)[0].reason == "poison"
