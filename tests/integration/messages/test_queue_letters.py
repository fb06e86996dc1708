"""Batches of a queue that are given up, their dead letters, and the dmq."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import BatchGivenUp, LetterRefused, UnknownLetter
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.draining import Plan, drain
from tests import queues
from tests.batches import taken
from tests.limits import shorten
from tests.waiting import until, waits

pytestmark = [pytest.mark.hstore, pytest.mark.usefixtures("few_sessions")]

FEED = QueueFeed("q")


@pytest.fixture
def connection(connect):
    connection = connect()
    queues.make(connection)
    return connection


def work(db, feed=FEED):
    """Receive a batch, and return its messages."""
    return [change.data["data"]["n"] for change in taken(feed, db)]


def given_up(db):
    def process(transaction, batch):
        raise ValueError("poison")

    return drain(Plan(FEED, db, max_attempts=1, on_give_up="dead_letter"), process)


def test_a_batch_that_failed_as_often_as_it_may_is_refused(db, connection):
    queues.fill(connection, range(3))
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        raise ZeroDivisionError("poison")
    with pytest.raises(BatchGivenUp, match="queue:q/default"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000, max_attempts=1)


def test_a_batch_that_is_given_up_is_a_dead_letter_and_the_consumer_goes_on(db, connection):
    queues.fill(connection, range(3))
    assert len(given_up(db).letters) == 1
    queues.fill(connection, [3])
    assert work(db) == ["3"]
    (letter,) = dead_letters.letters(connection)
    assert (letter.kind, letter.consumer, letter.changes, letter.attempts) == (
        "queue",
        "queue:q/default",
        3,
        1,
    )
    assert (letter.error, letter.hindrance) == ("ValueError: poison", None)
    assert connection.execute("select count(*) from mbus.dmq").fetchone() == (3,)


def test_a_letter_holds_the_first_hundred_of_its_messages(db, connection):
    iids = queues.fill(connection, range(101))
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    held = dead_letters.letter_content(connection, letter.id)
    assert [one["iid"] for one in held["holds"]] == iids[:100]
    assert (held["messages"], held["holds"][0]["data"]) == (101, {"n": "0"})


def test_of_a_letter_what_is_long_is_left_out_and_not_more_than_a_part_is_shown(db, connection):
    queues.post(connection, "x" * 30_000)
    queues.fill(connection, ["x" * 15_000] * 50)
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    held = dead_letters.letter_content(connection, letter.id)
    assert "left out" in held["holds"][0]["data"]
    assert held["holds"][1]["data"] == {"n": "x" * 15_000}
    assert (held["messages"], len(held["holds"])) == (51, 14)


def test_a_message_that_was_posted_to_the_dmq_is_what_its_letter_holds(connection):
    queues.post(connection, 1)
    connection.execute(
        "select mbus.post_dmq(data, headers, properties || 'kind=>odd', iid => iid) from mbus.consume('q')"
    )
    (letter,) = dead_letters.letters(connection)
    (held,) = dead_letters.letter_content(connection, letter.id)["holds"]
    assert (held["iid"], held["data"], held["properties"]["kind"]) == ("q.1", {"n": "1"}, "odd")


def test_no_letter_shows_the_messages_of_another(owner, role, connect_to):
    who = role("user")
    for queue in ("q", "r"):
        owner.execute("select mbus.post_dmq('n=>1', iid => mbus.get_iid(%s))", [queue])
    owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_other to {who.name}")
    owner.execute(f"select mbus.grant_admin('{who.name}')")
    own, other = dead_letters.letters(owner)
    session = connect_to(who.conninfo)
    assert [letter.id for letter in dead_letters.letters(session)] == [own.id]
    assert len(dead_letters.letter_content(session, own.id)["holds"]) == 1
    with pytest.raises(UnknownLetter):
        dead_letters.letter_content(session, other.id)
    made_up = "select mbus.letter_content('{\"queue\": \"q\"}', jsonb_build_object('letter', %s::bigint)) -> 'holds'"
    assert queues.one(session, made_up, other.id) == []


def test_a_letter_that_is_sent_again_brings_its_messages_to_its_consumer_alone(db, connection):
    queues.consumer(connection, "other")
    iids = queues.fill(connection, range(3))
    assert len(work(db, feed=QueueFeed("q", "other"))) == 3
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    dead_letters.redrive(connection, ids=[letter.id])
    assert dead_letters.letters(connection) == []
    assert work(db, feed=QueueFeed("q", "other")) == []
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        assert [change.id for change in consumer.changes()] == iids
        consumer.ack()


def test_a_message_behind_a_message_that_was_given_up_goes_on_waiting(db, connection):
    queues.make(connection, "after")
    queues.post(connection, 2, "after", after=[queues.post(connection, 1)])
    given_up(db)
    assert queues.consume(connection, queue="after") is None
    dead_letters.redrive(connection, consumer="queue:q/default")
    assert queues.consume(connection, queue="after") is None
    assert work(db) == ["1"]
    assert queues.consume(connection, queue="after") == "2"


def test_a_message_in_the_dmq_is_a_dead_letter(connection):
    iid = queues.post(connection, 1)
    message = "m.data, m.headers || '\"dmq.error\"=>boom', iid => m.iid"
    connection.execute(f"select mbus.post_dmq({message}) from mbus.consume('q') as m")
    (letter,) = dead_letters.letters(connection)
    assert (letter.consumer, letter.error, letter.changes) == ("queue:q", "boom", 1)
    assert queues.take(connection, iid) == "1"
    assert dead_letters.letters(connection) == []


def test_a_message_that_one_consumer_put_in_the_dmq_comes_again_to_it_alone(connection):
    queues.consumer(connection, "other")
    queues.post(connection, 1)
    assert queues.drain(connection, "other") == ["1"]
    connection.execute("select mbus.post_dmq(m.data, iid => m.iid) from mbus.consume('q') as m")
    (letter,) = dead_letters.letters(connection)
    dead_letters.redrive(connection, ids=[letter.id])
    assert (queues.drain(connection, "other"), queues.drain(connection)) == ([], ["1"])


def test_a_message_that_was_received_before_may_still_be_put_in_the_dmq(connection):
    queues.consumer(connection, "other")
    iid = queues.post(connection, 1)
    assert queues.drain(connection) == ["1"]
    connection.execute("select mbus.post_dmq('n=>1', iid => %s)", [iid])
    assert len(dead_letters.letters(connection)) == 1
    assert queues.drain(connection, "other") == ["1"]


def test_dropping_a_letter_forgets_its_messages_and_sets_free_who_waits(db, connection):
    queues.make(connection, "after")
    queues.post(connection, 2, "after", after=[queues.post(connection, 1)])
    given_up(db)
    assert queues.consume(connection, queue="after") is None
    dead_letters.drop_letters(connection, consumer="queue:q/default")
    assert connection.execute("select count(*) from mbus.dmq").fetchone() == (0,)
    assert queues.consume(connection, queue="after") == "2"


def test_a_letter_whose_consumer_is_gone_stays_and_says_so(db, connection):
    queues.fill(connection, range(3))
    given_up(db)
    connection.execute("select mbus.drop_consumer('default', 'q')")
    (letter,) = dead_letters.letters(connection)
    assert "unknown consumer:default" in letter.hindrance
    with pytest.raises(LetterRefused):
        dead_letters.redrive(connection, ids=[letter.id])
    assert len(dead_letters.letters(connection)) == 1


def test_a_message_whose_only_consumer_is_gone_does_not_come_to_the_others(connection):
    queues.consumer(connection, "other")
    queues.post(connection, 1)
    assert queues.drain(connection) == ["1"]
    connection.execute("select mbus.post_dmq(m.data, iid => m.iid) from mbus.consume('q', 'other') as m")
    connection.execute("select mbus.drop_consumer('other', 'q')")
    (letter,) = dead_letters.letters(connection)
    assert "were dropped" in letter.hindrance
    with pytest.raises(LetterRefused, match="were dropped"):
        dead_letters.redrive(connection, ids=[letter.id])
    assert queues.drain(connection) == []


def test_a_message_that_comes_again_from_the_dmq_is_not_copied_again(connection):
    queues.make(connection, "audit")
    connection.execute("select mbus.create_trigger('q', 'audit')")
    iid = queues.post(connection, 1)
    assert (queues.drain(connection), queues.drain(connection, queue="audit")) == (["1"], ["1"])
    connection.execute("select mbus.post_dmq('n=>1', iid => %s)", [iid])
    dead_letters.redrive(connection, consumer="queue:q")
    assert (queues.drain(connection), queues.drain(connection, queue="audit")) == (["1"], [])
    assert queues.there(connection) == []


def test_a_skip_waits_for_a_claim_that_dissolves_the_batch_and_is_then_refused(db, connection, connect):
    first, _ = queues.fill(connection, range(2))
    slot, claim, opener, skipper = (connect(autocommit=False) for _ in range(4))
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        # The later claim works in slot 1. The batch's own slot 0 is then free for the skip.
        slot.execute("select mbus.take_lock('q', 'default')")
        raise ZeroDivisionError("poison")
    assert queues.take(connection, first) == "0"
    position = queues.one(slot, "select mbus.position('q', 'default')")
    # The claim pauses after it has locked the batch and before it locks the messages.
    shorten(connection, "mbus.dissolve", "begin", "begin perform pg_advisory_xact_lock(1);")
    opener.execute("select pg_advisory_xact_lock(1)")
    with ThreadPoolExecutor() as threads:
        claimed = threads.submit(
            queues.one, claim, "select mbus.claim('q', 'default', %s, 10)", Jsonb(position)
        )
        until(connection, waits(claim, behind=opener))
        skipped = threads.submit(queues.one, skipper, "select mbus.skip_batch('q', 'default', 'poison')")
        until(connection, waits(skipper, behind=claim))
        opener.rollback()
        assert claimed.result()["count"] == 1
        claim.commit()
        with pytest.raises(psycopg.DatabaseError, match="at work, or acked"):
            skipped.result()


def test_a_skip_that_meets_an_ack_is_refused_as_the_batch_is_at_work(db, connection, connect):
    queues.post(connection, 0)
    skipper, opener = connect(autocommit=False), connect(autocommit=False)
    # If the ack does not wait for the skip, the skip ends with an error instead of waiting for ever.
    skipper.execute("set lock_timeout = '5s'")
    # The skip pauses before it reads which batches are at work.
    shorten(connection, "mbus.pending", "begin", "begin perform pg_advisory_xact_lock(1);")
    with ThreadPoolExecutor() as threads, ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        opener.execute("select pg_advisory_xact_lock(1)")
        skipped = threads.submit(
            queues.one,
            skipper,
            "select mbus.skip('q', 'default', b.batch || jsonb_build_object('attempt', 1), 'poison') "
            "from mbus.batch as b",
        )
        until(connection, waits(skipper, behind=opener))
        acked = threads.submit(consumer.ack)
        until(connection, waits(behind=skipper), patience=2)
        opener.rollback()
        with pytest.raises(psycopg.DatabaseError, match="at work, or acked"):
            skipped.result()
        skipper.rollback()
        acked.result()
    assert connection.execute("select count(*) from mbus.dmq").fetchone() == (0,)


def test_messages_of_a_key_are_erased_from_letters_and_the_others_come_again(db, connection):
    iids = queues.fill(connection, range(4))
    connection.execute("select mbus.post_q('n=>4'::hstore, properties => 'who=>ann'::hstore)")
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    for key, field in [(iids[0], None), ("1", "n"), ("ann", "who")]:
        assert dead_letters.erase_letters(connection, key, field=field) == [
            dead_letters.ErasedLetter(letter.id, 1)
        ]
        assert dead_letters.erase_letters(connection, key, field=field) == []
    assert dead_letters.letters(connection)[0].changes == 2
    assert dead_letters.letter_content(connection, letter.id)["messages"] == 2
    assert dead_letters.erase_letters(connection, "2", field="n", consumer="queue:q/default") != []
    dead_letters.redrive(connection, ids=[letter.id])
    assert work(db) == ["3"]
    # A letter without any remaining message is dropped.
    queues.fill(connection, [7, 7])
    given_up(db)
    (letter,) = dead_letters.letters(connection)
    assert dead_letters.erase_letters(connection, "7", field="n") == [dead_letters.ErasedLetter(letter.id, 2)]
    assert (dead_letters.letters(connection), queues.one(connection, "select count(*) from mbus.dmq")) == (
        [],
        0,
    )
