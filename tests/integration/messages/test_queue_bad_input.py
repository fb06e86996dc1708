"""Invalid input is refused with advice, and nothing is lost."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.errors import InvalidArgument
from tests.queues import consumer, drain, fill, make

pytestmark = pytest.mark.hstore


@pytest.fixture(scope="module")
def unchanged(shared):
    """A connection to a database whose queue q has two messages. Refused calls leave them as they are."""
    make(shared)
    fill(shared, [1, 2])
    return shared


def everything(connection):
    """Return the queues, their consumers and triggers, and the messages."""
    query = (
        "select (select array_agg(t::text) from mbus.queue as t), (select array_agg(t::text) from mbus.consumer as t), "
        '(select array_agg(t::text) from mbus.trigger as t), (select array_agg(t::text) from mbus."log$q" as t), '
        "(select array_agg(t::text) from mbus.position as t)"
    )
    return connection.execute(query).fetchall()


@pytest.mark.parametrize("name", ["", "A", "a b", "x" * 33, "ü", "a-b", "a.b", None, "dmq"])
def test_a_name_that_breaks_the_rules_is_refused(unchanged, name):
    before = everything(unchanged)
    with pytest.raises(psycopg.Error, match="Wrong queue name:"):
        unchanged.execute("select mbus.create_queue(%s, 4)", [name])
    if name != "dmq":
        with pytest.raises(psycopg.Error, match="Wrong consumer name:"):
            unchanged.execute("select mbus.create_consumer(%s, 'q')", [name])
    assert everything(unchanged) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("mbus.post('nowhere', 'n=>1')", "Unknown queue:nowhere"),
        ("mbus.post(null, 'n=>1')", "Unknown queue:"),
        ("mbus.drop_queue('nowhere')", "Queue nowhere does not exists"),
        ("mbus.get_iid('nowhere')", "No such queue: nowhere"),
        ("mbus.create_consumer('c', 'nowhere')", "Wrong queue name:nowhere"),
        ("mbus.consume('nowhere')", "Queue nowhere does not exists"),
        ("mbus.consume('q', 'nobody')", "unknown consumer:nobody"),
        ("mbus.drop_consumer('nobody', 'q')", "unknown consumer:nobody"),
        ("mbus.create_consumer('default', 'q')", "Wrong consumer name:default"),
        ("mbus.create_consumer('c', 'q', 'no such thing')", "Wrong selector:"),
        ("mbus.create_consumer('c', 'q', 'true) or (true')", "Wrong selector:|cannot"),
        ("mbus.create_trigger('q', 'nowhere')", "Queue nowhere does not exists"),
        ("mbus.create_view('q', 'nobody')", "unknown consumer:nobody"),
        ("mbus.consumen_q_by_default(0)", "0 messages cannot be consumed"),
        ("mbus.create_queue('r', 0)", "cannot have 0 parts"),
        ("mbus.post_q('n=>1', iid => 'r.1')", "Wrong iid=r.1 for queue q"),
        ("mbus.post_q('n=>1', expires => '294276-12-31 23:59:59')", "is_receivable"),
        ("mbus.post_q('n=>1', delayed_until => '4713-12-31 BC')", "is_receivable"),
        (
            "mbus.postn_q(array['n=>1']::hstore[], properties => array['a=>1', 'a=>2']::hstore[])",
            "more elements than data",
        ),
        ("mbus.postn_q(null, iid => array[mbus.get_iid('q')])", "more elements than data"),
        ("mbus.post_q('n=>1', headers => 'consume_after=>\"{a\"')", "Wrong consume_after:"),
    ],
)
def test_an_invalid_call_is_refused_with_the_reason(unchanged, call, words):
    before = everything(unchanged)
    with pytest.raises(psycopg.Error, match=words):
        unchanged.execute(f"select {call}")
    assert everything(unchanged) == before


def test_messages_are_received_after_calls_that_were_refused(q):
    fill(q, [1, 2])
    for refused in (
        "mbus.consumen_q_by_default(0)",
        "mbus.post_q('n=>1', iid => 'r.1')",
        "mbus.consume('q', 'x')",
    ):
        with pytest.raises(psycopg.Error):
            q.execute(f"select {refused}")
    assert drain(q) == ["1", "2"]


def test_times_without_an_end_are_taken(q):
    q.execute("select mbus.post_q('n=>1', delayed_until => '-infinity', expires => 'infinity')")
    assert drain(q) == ["1"]


def test_two_names_that_make_one_function_are_refused(q):
    make(q, "a", "a_by_b")
    consumer(q, "b_by_c", queue="a")
    with pytest.raises(psycopg.Error, match="Wrong consumer name:c"):
        consumer(q, "c", queue="a_by_b")


def test_no_queue_has_a_name_that_makes_a_function_of_ours(q):
    make(q, "for_saga")
    prefixes = "^(post|postn|peek|clear_queue|run_on|consume|consumen|take_from)_"
    ours = q.execute(
        "select distinct proname from pg_proc where pronamespace = 'mbus'::regnamespace and proname ~ %s "
        "and proname !~ '_(q|for_saga)(_by_default)?$' order by 1",
        [prefixes],
    ).fetchall()
    assert ours == [("consume_temp",), ("post_dmq",), ("post_temp",)]
    for reserved in ("temp", "dmq"):
        with pytest.raises(psycopg.Error, match=f"Wrong queue name:{reserved}"):
            make(q, reserved)


def test_a_name_that_would_be_cut_is_refused_whole(q):
    make(q, "r" * 15)
    with pytest.raises(psycopg.Error, match="too long"):
        consumer(q, "c" * 32, queue="r" * 15)
    assert q.execute("select distinct name from mbus.consumer").fetchall() == [("default",)]


def test_the_same_name_of_a_consumer_may_be_used_on_several_queues(q):
    make(q, "r")
    consumer(q, "same")
    consumer(q, "same", queue="r")
    fill(q, [1])
    assert drain(q, "same") == ["1"]


def test_hstore_may_live_in_any_schema(bare_db, connect_to):
    from airflow_pgchange.admin import schema

    connection = connect_to(bare_db)
    connection.execute('create schema "Odd one"')
    connection.execute('create extension hstore schema "Odd one"')
    schema.install(connection, ["mbus"])
    make(connection)
    connection.execute("select mbus.create_consumer('c', 'q', $$data->'n' = '1'$$)")
    connection.execute("select mbus.post_q('n=>1'), mbus.post_q('n=>2', headers => 'consume_after=>{q.1}')")
    assert connection.execute("select iid from mbus.consumen_q_by_c(10)").fetchall() == [("q.1",)]
    assert connection.execute("select iid from mbus.consumen_q_by_default(10)").fetchall() == [("q.1",)]
    assert connection.execute("select iid from mbus.consumen_q_by_default(10)").fetchall() == [("q.2",)]
    schema.uninstall(connection, ["mbus"])


def test_uninstalling_takes_the_queues_and_roles_and_nobody_elses(db, connect_to):
    from airflow_pgchange.admin import schema

    connection = connect_to(db)
    name = connection.info.dbname
    make(connection, "q", "r", roles=True)
    connection.execute("create role mbus_mine")
    mine = "select rolname from pg_roles where rolname like %s order by 1"
    assert len(connection.execute(mine, [f"mbus_{name}_%"]).fetchall()) == 7
    connection.execute("select mbus.create_view('q')")
    schema.uninstall(connection, ["mbus"])
    assert connection.execute(mine, [f"mbus_{name}_%"]).fetchall() == []
    assert connection.execute(mine, ["mbus_mine"]).fetchall() == [("mbus_mine",)]
    connection.execute("drop role mbus_mine")
    assert connection.execute("select from pg_extension where extname = 'hstore'").fetchall() == [()]


def test_the_core_is_not_removed_from_under_the_queues(db, connect_to):
    from airflow_pgchange.admin import schema

    connection = connect_to(db)
    with pytest.raises(InvalidArgument, match="mbus needs core"):
        schema.uninstall(connection, ["core", "revision", "pubsub", "tube", "pgmb", "topology"])
