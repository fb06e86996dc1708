"""Selectors: which are refused, and the effect of a selector that fails."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.rows import dict_row

from airflow_pgchange.admin.maintenance import maintain
from tests.findings import findings
from tests.queues import BOUNDS, consume, consumer, drain, fill, make, one, post, take, there

pytestmark = pytest.mark.hstore


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
def test_a_selector_that_is_no_condition_on_a_message_is_refused(q, selector):
    with pytest.raises(psycopg.Error, match="Wrong selector"):
        consumer(q, "c", selector)
    assert q.execute("select name from mbus.consumer").fetchall() == [("default",)]


def test_a_selector_may_end_in_a_comment(q):
    consumer(q, "c", "t.data->'n' = '1' -- the first")
    fill(q, [1, 2])
    assert drain(q, "c") == ["1"]


def test_a_selector_runs_as_the_owner_whoever_consumes(q, role, connect_to):
    make(q, "r", roles=True)
    q.execute(
        "create function public.whose(text) returns boolean language plpgsql immutable as "
        "$$ begin return $1 = current_user; end $$"
    )
    consumer(q, "whose", "public.whose(t.properties->'kind')", queue="r")
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
    [(name, made)] = q.execute(
        "select indexname, indexdef from pg_indexes where tablename = 'log$q' and indexdef ~ 'WHERE.*retail'"
    )
    assert "(id)" in made
    fill(q, range(3000))
    q.execute("select mbus.post('q', 'n=>it', properties => 'kind=>retail'); analyze mbus.\"log$q\"")
    assert drain(q, "retail") == ["it"]
    q.execute("select pg_stat_force_next_flush()")
    assert one(q, f"select idx_scan from pg_stat_user_indexes where indexrelname = '{name}'") > 0


def test_a_selector_has_all_that_hstore_has(q):
    consumer(
        q,
        "c",
        "t.data @> 'n=>1'::hstore and exist(t.data, 'n') and 'n' = any (akeys(t.data)) and (t.data || 'm=>2') ? 'm'",
    )
    fill(q, [1, 2])
    assert drain(q, "c") == ["1"]


def test_a_selector_that_takes_too_long_is_cancelled_and_stops_nobody_else(q):
    q.execute(
        "create function public.slow(text) returns boolean language plpgsql immutable as $$ begin "
        "perform pg_sleep(coalesce(current_setting('test.seconds', true), '0')::float); return true; end $$"
    )
    consumer(q, "slow", "public.slow(t.data->'n')")
    fill(q, [1])
    q.execute("set test.seconds = '60'; set statement_timeout = '50ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        consume(q, "slow")
    q.execute("reset statement_timeout; set test.seconds = '0'")
    assert drain(q) == ["1"]
    assert there(q) == ["1"]


def test_a_message_on_which_a_selector_failed_is_received_once_it_matches(q):
    q.execute(BOUNDS)
    consumer(q, "number", "(t.data->'n')::integer / public.bound(t.data->'n') > 0")
    q.execute("insert into bounds values (0)")
    fill(q, [5])
    assert drain(q, "number") == []
    q.execute("insert into bounds values (2)")
    assert one(q, "select mbus.retry_faults('q', 'number')") == 1
    assert drain(q, "number") == ["5"]
    assert q.execute("select from mbus.fault").fetchall() == []


def test_a_message_on_which_a_selector_failed_blocks_nothing_once_it_does_not_match(q):
    make(q, "r")
    q.execute(BOUNDS + "insert into bounds values (0)")
    consumer(q, "number", "(t.data->'n')::integer / public.bound(t.data->'n') > 5")
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
    assert findings(q, "mbus") == []


def test_messages_on_which_a_new_consumers_selector_fails_are_kept_for_it(q):
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


CHANGING = [
    "now() > t.added",
    "t.added > localtimestamp - interval '1 hour'",
    "clock_timestamp() > t.added",
    "t.properties->'kind' = current_user",
    "t.properties->'kind' = session_user",
    "t.properties->'kind' = current_setting('application_name')",
    "(t.data->'at')::timestamptz > '2026-01-01'",
    "(t.data->'at')::date > '2026-01-01'",
    "random() < 0.5",
    "nextval('public.n') > 0",
    "public.kind_of(t.data->'n') = 'odd'",
]
ASKING = ["t.data->'n' in (select n from public.numbers)", "exists (select from each(t.data))"]


@pytest.mark.parametrize("by", ["consumer", "temporary consumer", "trigger"])
def test_a_selector_whose_result_can_change_is_refused(q, by):
    make(q, "r")
    q.execute(
        "create sequence public.n; create table public.numbers (n text); create function public.kind_of(text) "
        "returns text language plpgsql stable as $$ begin return 'odd'; end $$"
    )
    made = {
        "consumer": "select mbus.create_consumer('c', 'q', %s)",
        "temporary consumer": "select mbus.create_temporary_consumer('q', %s)",
        "trigger": "select mbus.create_trigger('q', 'r', %s)",
    }[by]
    for selector in CHANGING + ASKING:
        with pytest.raises(psycopg.Error, match="Wrong selector") as refused:
            q.execute(made, [selector])
        assert (
            "is evaluated when a message is posted and whenever it is read"
            in refused.value.diag.message_detail
        )
        hint = "immutable" if selector in CHANGING else "a subquery"
        assert hint in refused.value.diag.message_hint
    assert q.execute("select name from mbus.consumer where qname = 'q'").fetchall() == [("default",)]
    assert q.execute("select from mbus.trigger").fetchall() == []


def test_a_selector_may_call_what_is_immutable(q):
    q.execute(
        "create function public.is_odd(text) returns boolean language sql immutable return $1::integer % 2 = 1"
    )
    consumer(
        q, "odd", "public.is_odd(t.data->'n') and t.added > '2020-01-01' and (t.data->'n')::numeric < 10"
    )
    fill(q, [1, 2, 3, 11])
    assert drain(q, "odd") == ["1", "3"]
