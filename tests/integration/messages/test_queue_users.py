"""Objects of users that depend on queues. They prevent the drop of a queue, and the error names them."""

from __future__ import annotations

import psycopg
import pytest

from tests.queues import consumer, make, one, post, there
from tests.waiting import until

pytestmark = pytest.mark.hstore

TAKES = "create function app.take_order() returns text begin atomic select iid from mbus.consume_q_by_default(); end"
POSTS = (
    """create function app.post_order() returns text begin atomic select mbus.post_q('n=>1'::hstore); end"""
)
THEIRS = {
    "function app.take_order()": TAKES,
    "function app.post_order()": POSTS,
    "view app.waiting": 'create view app.waiting as select iid from mbus."qt$q"',
    "view app.all_waiting": 'create view app.all_waiting as select iid from mbus."all$q"',
    "view app.orders": "create view app.orders as select * from public.q_q",
    "view app.posted": 'create view app.posted as select * from mbus."log$q"',
    "materialized view app.kept": "create materialized view app.kept as select iid from public.q_q with no data",
}


@pytest.fixture
def q(connect):
    connection = connect()
    make(connection)
    connection.execute("create schema app; select mbus.create_view('q')")
    post(connection, 1)
    return connection


def test_a_queue_upon_which_others_have_built_is_not_dropped(q):
    for name, made in THEIRS.items():
        q.execute(made)
        with pytest.raises(psycopg.errors.DependentObjectsStillExist) as refused:
            q.execute("select mbus.drop_queue('q')")
        assert refused.value.diag.message_primary == f"queue q is used by others: {name}"
        assert "drop them first" in refused.value.diag.message_hint, name
        assert there(q) == ["1"], name
        q.execute(f"drop {name}")
    q.execute("select mbus.drop_queue('q')")
    assert q.execute("select from mbus.queue").fetchall() == []


def test_all_that_others_have_built_is_named_once(q):
    for made in THEIRS.values():
        q.execute(made)
    with pytest.raises(psycopg.errors.DependentObjectsStillExist) as refused:
        q.execute("select mbus.drop_queue('q')")
    assert refused.value.diag.message_primary == f"queue q is used by others: {', '.join(sorted(THEIRS))}"


def test_a_consumer_upon_which_others_have_built_is_not_dropped(q):
    consumer(q, "other")
    q.execute(TAKES.replace("by_default", "by_other"))
    with pytest.raises(psycopg.errors.DependentObjectsStillExist) as refused:
        q.execute("select mbus.drop_consumer('other', 'q')")
    assert (
        refused.value.diag.message_primary
        == "consumer other of queue q is used by others: function app.take_order()"
    )
    q.execute("drop function app.take_order(); select mbus.drop_consumer('other', 'q')")


def test_a_function_that_names_a_queue_only_in_a_text_does_not_prevent_its_drop(q):
    make(q, "r")
    q.execute(TAKES.replace("_q_", "_r_"))
    q.execute("create function app.late() returns text language sql return 'mbus.post_q'")
    q.execute(
        "create function app.later() returns void language plpgsql as 'begin perform mbus.post_q(null); end'"
    )
    q.execute("select mbus.drop_queue('q')")
    assert q.execute("select qname from mbus.queue").fetchall() == [("r",)]


def test_what_others_have_built_outlives_that_the_functions_of_its_queue_are_made_anew(q):
    q.execute(TAKES)
    q.execute(POSTS)
    make(q)
    assert q.execute("select app.post_order()").fetchone() == ("q.2",)
    assert q.execute("select app.take_order()").fetchone() == ("q.1",)


def test_a_temporary_consumer_upon_which_others_have_built_stays_and_keeps_no_other(q, connect_to, db):
    session = connect_to(db)
    used, other = (one(session, "select mbus.create_temporary_consumer('q', 'true')") for _ in range(2))
    q.execute(TAKES.replace("default", used))
    session.close()
    until(q, f"select not mbus.lives('q {used}') and not mbus.lives('q {other}')")
    told = []
    q.add_notice_handler(lambda notice: told.append(notice.message_primary))
    q.execute("select mbus.maintain()")
    assert told == [f"consumer {used} of queue q is used by others: function app.take_order()"]
    assert q.execute("select name from mbus.consumer order by id").fetchall() == [("default",), (used,)]
    q.execute("drop function app.take_order(); select mbus.maintain()")
    assert q.execute("select name from mbus.consumer").fetchall() == [("default",)]
