"""Messages that are put back into the queue with changes: none is lost, whichever way it comes back."""

from __future__ import annotations

import itertools

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import LetterRefused
from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.draining import drain as work_off
from tests.queues import consume, consumer, drain, one, post, take, there
from tests.waiting import until

pytestmark = pytest.mark.hstore

WANTED = "(t.properties->'kind') = 'retail'"
TAKEN_BACK = "message q.1 cannot be put back"


@pytest.fixture
def retail(q):
    """A connection to queue q.

    The consumer default has received message q.1, which the consumer retail is still to receive.
    """
    consumer(q, "retail", WANTED)
    post(q, 1, kind="retail")
    assert drain(q) == ["1"]
    return q


RECEIVED = {
    "one": "select iid from mbus.consume('q', 'retail')",
    "many": "select iid from mbus.consumen_q_by_retail(10)",
    "by its id": "select iid from mbus.take_from_q_by_retail('q.1')",
    "for all": "select iid from mbus.take('q.1')",
}
PUT_BACK = {
    "post": "select mbus.post('q', 'n=>2', properties => 'kind=>other', iid => 'q.1')",
    "post to the queue": "select mbus.post_q('n=>2', properties => 'kind=>other', iid => 'q.1')",
    "without properties": "select mbus.post_q('n=>2', iid => 'q.1')",
    "many": "select mbus.postn_q(array['n=>2']::hstore[], properties => array['kind=>other']::hstore[], "
    "iid => array['q.1'])",
    "later": "select mbus.post_q('n=>2', properties => 'kind=>other', iid => 'q.1', "
    "delayed_until => localtimestamp + interval '1 hour')",
    "through the view": "insert into public.q_q (data, properties, iid) values ('n=>2', 'kind=>other', 'q.1')",
}


def test_a_message_that_nobody_would_receive_again_is_not_put_back(retail):
    retail.execute("select mbus.create_view('q')")
    for received, back in itertools.product(RECEIVED.values(), PUT_BACK.values()):
        with pytest.raises(psycopg.Error, match=TAKEN_BACK) as refused, retail.transaction():
            assert one(retail, received) == "q.1"
            retail.execute(back)
        assert "keep its properties" in refused.value.diag.message_hint
        retail.execute("select pg_sleep(0.03)")
    assert drain(retail, "retail") == ["1"]


def test_a_retried_message_is_not_put_back_beyond_its_consumers_selector(q):
    consumer(q, "first", "not exist(t.properties, 'tries')")
    q.execute("select mbus.drop_consumer('default', 'q')")
    post(q, 1)
    with pytest.raises(psycopg.Error, match=TAKEN_BACK), q.transaction():
        one(q, "select mbus.try_again(iid, '0') from mbus.consume('q', 'first')")
    assert drain(q, "first") == ["1"]


def test_a_temporary_consumer_does_not_put_back_what_nobody_would_receive_again(q, connect):
    session = connect()
    name = one(session, f"select mbus.create_temporary_consumer('q', $${WANTED}$$)")
    post(q, 1, kind="retail")
    assert drain(q) == ["1"]
    with pytest.raises(psycopg.Error, match=TAKEN_BACK), session.transaction():
        assert consume(session, name) == "1"
        session.execute(PUT_BACK["post"])
    assert drain(session, name) == ["1"]


def test_a_message_goes_on_to_those_for_whom_it_was_not_before(retail):
    consumer(retail, "other", "(t.properties->'kind') = 'other'")
    with retail.transaction():
        assert consume(retail, "retail") == "1"
        retail.execute(PUT_BACK["post"])
    assert there(retail) == ["2"]
    assert [drain(retail, name) for name in ("default", "retail", "other")] == [[], [], ["2"]]
    assert there(retail) == []


def test_a_message_that_goes_from_one_to_another_comes_to_none_of_them_twice(q):
    for n in range(3):
        consumer(q, f"c{n}", f"(t.properties->'kind') = '{n}'")
    post(q, 0, kind="0")
    assert drain(q) == ["0"]
    for n in range(2):
        with q.transaction():
            assert consume(q, f"c{n}") == str(n)
            post(q, n + 1, kind=str(n + 1), iid="q.1")
    assert [drain(q, name) for name in ("default", "c0", "c1", "c2")] == [[], [], [], ["2"]]


def test_a_message_on_which_the_selector_fails_is_kept_for_its_consumer(q):
    consumer(q, "number", "(t.properties->'kind')::integer > 0")
    post(q, 1, kind="1")
    assert drain(q) == ["1"]
    with q.transaction():
        assert consume(q, "number") == "1"
        post(q, 2, kind="x", iid="q.1")
    assert drain(q, "number") == []
    assert q.execute("select consumer from mbus.fault").fetchall() == [("number",)]
    assert there(q) == ["2"]


def test_a_message_put_back_for_a_dropped_consumer_stays_if_nobody_else_had_it(q):
    consumer(q, "retail", WANTED)
    q.execute("select mbus.drop_consumer('default', 'q')")
    post(q, 1, kind="retail")
    with q.transaction():
        assert consume(q, "retail") == "1"
        post(q, 2, kind="retail", iid="q.1")
    q.execute("select mbus.drop_consumer('retail', 'q'); select mbus.maintain()")
    assert there(q) == ["2"]
    consumer(q, "next", WANTED)
    assert drain(q, "next") == ["2"]


def test_a_message_put_back_by_a_temporary_consumer_is_deleted_with_it_if_others_had_it(q, connect_to, db):
    session = connect_to(db)
    name = one(session, f"select mbus.create_temporary_consumer('q', $${WANTED}$$)")
    post(q, 1, kind="retail")
    assert drain(q) == ["1"]
    with session.transaction():
        assert consume(session, name) == "1"
        post(session, 2, kind="retail", iid="q.1")
    session.close()
    until(q, f"select not mbus.lives('q {name}')")
    q.execute("select mbus.clear_tempq(); select mbus.maintain()")
    assert there(q) == []


def give_up(db, consumer="retail"):
    """Make a dead letter of all messages that a consumer has to receive."""

    def fail(transaction, batch):
        raise ValueError("poison")

    work_off(Plan(QueueFeed("q", consumer), db, max_attempts=1, on_give_up="dead_letter"), fail)


def put_away(db):
    dead = "select mbus.post_dmq(m.data, properties => m.properties, iid => m.iid) from mbus.consume('q', 'retail') as m"
    with psycopg.connect(db) as connection:
        connection.execute(dead)


@pytest.mark.parametrize("put_away", [give_up, put_away])
def test_a_letter_that_nobody_would_receive_is_not_sent_and_says_why(retail, db, put_away):
    put_away(db)
    (letter,) = dead_letters.letters(retail)
    assert letter.hindrance is None
    retail.execute("update mbus.dmq set properties = 'kind=>other'")
    (letter,) = dead_letters.letters(retail)
    assert "message q.1 does not match the selector of consumer retail" in letter.hindrance
    with pytest.raises(LetterRefused, match="does not match the selector of consumer retail"):
        dead_letters.redrive(retail, ids=[letter.id])
    assert len(dead_letters.letters(retail)) == 1
    retail.execute("update mbus.dmq set properties = 'kind=>retail'")
    assert dead_letters.redrive(retail, ids=[letter.id]) == [letter.id]
    assert (drain(retail), drain(retail, "retail")) == ([], ["1"])


def test_a_message_that_was_put_away_changed_is_not_sent_to_nobody(retail):
    with retail.transaction():
        assert consume(retail, "retail") == "1"
        retail.execute("select mbus.post_dmq('n=>1', properties => 'kind=>other', iid => 'q.1')")
    (letter,) = dead_letters.letters(retail)
    assert "does not match the selector of consumer retail" in letter.hindrance
    assert take(retail, "q.1") == "1"


def test_a_letter_is_not_sent_past_a_consumer_that_was_made_anew(q, db):
    consumer(q, "retail")
    post(q, 1)
    give_up(db)
    q.execute("select mbus.drop_consumer('retail', 'q')")
    consumer(q, "retail", WANTED)
    (letter,) = dead_letters.letters(q)
    assert "does not match the selector of consumer retail" in letter.hindrance
