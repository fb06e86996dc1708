"""Selectors: which are refused, and what becomes of those that fail."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.rows import dict_row

from airflow_pgchange.maintenance import maintain
from tests.queues import consume, consumer, drain, fill, make, one, post, take, there

pytestmark = pytest.mark.hstore


@pytest.fixture
def q(connect):
    connection = connect()
    make(connection)
    return connection


@pytest.mark.parametrize(
    "selector",
    [
        "true) or (true",
        "true; drop table x",
        "'x'",
        "t.no_such_column = 1",
        "horizon > 1",
        "count(*) > 0",
        "row_number() over () > 0",
        "unnest(array[true, false])",
    ],
)
def test_what_is_no_condition_on_one_message_is_refused(q, selector):
    with pytest.raises(psycopg.Error, match="Wrong selector"):
        consumer(q, "c", selector)
    assert q.execute("select name from mbus.consumer").fetchall() == [("default",)]


def test_a_selector_may_end_in_a_comment(q):
    consumer(q, "c", "t.data->'n' = '1' -- the first")
    fill(q, [1, 2])
    assert drain(q, "c") == ["1"]


def test_a_selector_runs_as_the_owner_whoever_consumes(q, role, connect_to):
    make(q, "r", roles=True)
    consumer(q, "whose", "t.properties->'kind' = current_user", queue="r")
    who = role("user")
    q.execute(f"grant mbus_{q.info.dbname}_consume_r_by_whose to {who.name}")
    post(q, 1, "r", kind=who.name)
    post(q, 2, "r", kind=one(q, "select current_user"))
    assert drain(connect_to(who.conninfo), "whose", "r") == ["2"]
    q.execute("select mbus.drop_queue('r')")


def test_a_notice_gives_an_index_for_a_selector_that_few_messages_match(q):
    told: list[str] = []
    q.add_notice_handler(lambda notice: told.append(notice.message_primary))
    selector = "(t.properties->'kind') = 'retail' -- t.data"
    q.execute("select mbus.create_consumer('retail', 'q', %s, noindex => true)", [selector])
    (statements,) = told
    for statement in statements.split(";\n"):
        q.execute(statement)
    made = one(q, "select indexdef from pg_indexes where tablename = 'log$q' and indexdef ~ 'WHERE.*retail'")
    assert "(id)" in made
    fill(q, range(3000))
    q.execute("select mbus.post('q', 'n=>it', properties => 'kind=>retail'); analyze mbus.\"log$q\"")
    assert drain(q, "retail") == ["it"]
    used = "select idx_scan from pg_stat_user_indexes where indexrelname = 'log$q_id_idx'"
    q.execute("select pg_stat_force_next_flush()")
    assert one(q, used) > 0


def test_a_selector_has_all_that_hstore_has(q):
    consumer(
        q,
        "c",
        "t.data @> 'n=>1'::hstore and exist(t.data, 'n') and 'n' in (select e.key from each(t.data) as e)",
    )
    fill(q, [1, 2])
    assert drain(q, "c") == ["1"]


def test_a_selector_that_takes_too_long_is_cancelled_and_stops_nobody_else(q):
    consumer(q, "slow", "pg_sleep(coalesce(current_setting('test.seconds', true), '0')::float) is not null")
    fill(q, [1])
    q.execute("set test.seconds = '60'; set statement_timeout = '50ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        consume(q, "slow")
    q.execute("reset statement_timeout; set test.seconds = '0'")
    assert drain(q) == ["1"]
    assert there(q) == ["1"]


def test_what_a_selector_failed_on_is_received_once_it_no_longer_fails(q):
    q.execute("create table bounds (b integer)")
    consumer(q, "number", "(t.data->'n')::integer / (select sum(b) from public.bounds) > 0")
    q.execute("insert into bounds values (0)")
    fill(q, [5])
    assert drain(q, "number") == []
    q.execute("insert into bounds values (2)")
    assert one(q, "select mbus.retry_faults('q', 'number')") == 1
    assert drain(q, "number") == ["5"]
    assert q.execute("select from mbus.fault").fetchall() == []


def test_what_a_selector_failed_on_holds_up_nobody_once_it_does_not_match(q):
    make(q, "r")
    q.execute("create table bounds (b integer); insert into bounds values (0)")
    consumer(q, "number", "(t.data->'n')::integer / (select sum(b) from public.bounds) > 5")
    post(q, 6, "r", after=[post(q, 5)])
    assert drain(q) == ["5"]
    assert drain(q, "number") == drain(q, queue="r") == []
    q.execute("update bounds set b = 1")
    assert one(q, "select mbus.retry_faults('q', 'number')") == 0
    assert q.execute("select from mbus.fault").fetchall() == []
    assert drain(q, queue="r") == ["6"]


def test_a_fault_on_a_message_that_was_taken_is_over_when_it_is_looked_at_again(q):
    consumer(q, "number", "(t.data->'n')::integer > 0")
    iid = post(q, "x")
    assert drain(q, "number") == []
    assert take(q, iid) == "x"
    assert one(q, "select mbus.retry_faults('q', 'number')") == 0
    assert q.execute("select from mbus.troubles()").fetchall() == []


def test_what_the_selector_of_a_new_consumer_fails_on_is_kept_for_it(q):
    consumer(q, "other")
    fill(q, ["x", 1])
    assert drain(q) == ["x", "1"]
    consumer(q, "number", "(t.data->'n')::integer > 0")
    assert drain(q, "number") == ["1"]
    assert q.execute("select consumer, message_id from mbus.fault").fetchall() == [("number", 1)]


def test_a_connection_that_makes_dicts_of_its_rows_is_told_what_troubles_a_queue(q):
    consumer(q, "number", "(t.data->'n')::integer > 0")
    post(q, "x")
    assert drain(q, "number") == []
    q.row_factory = dict_row
    [trouble] = maintain(q).attention
    assert "number" in trouble
