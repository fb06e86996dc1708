"""Selectors have the same meaning in every session, whatever its time zone and its formats of times and numbers."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from tests.queues import consume, consumer, drain, make, one, post, there

pytestmark = pytest.mark.hstore

ELSEWHERE = (
    "set timezone = 'Etc/GMT-6'; set datestyle = 'ISO, DMY'; set intervalstyle = 'sql_standard'; "
    "set extra_float_digits = -15; set bytea_output = 'escape'; set transform_null_equals = on"
)


@pytest.fixture
def q(connect):
    connection = connect()
    connection.execute("set timezone = 'Etc/GMT+3'")
    make(connection)
    return connection


@pytest.fixture
def elsewhere(connect):
    """A session with other settings than the owner's session."""
    connection = connect()
    connection.execute(ELSEWHERE)
    return connection


def ends(connection):
    return one(connection, "select (clock_timestamp() + interval '1 hour')::timestamp")


SAME = {
    "added": "abs(extract(epoch from t.added) - public.now_in_utc()) < 600",
    "expires": "t.expires is null or extract(epoch from t.expires) - public.now_in_utc() between 3000 and 4200",
    "delayed": "extract(epoch from t.delayed_until) - public.now_in_utc() between -600 and 600",
    "float": "(t.data->'f')::float8::text = '0.30000000000000004'",
    "bytes": "decode(t.data->'b', 'hex')::text = '\\x0001'",
    "null": "(t.data->'missing' = null) is null",
}
CLOCK = """
create function public.now_in_utc() returns float8 language plpgsql immutable as $$
begin
    return extract(epoch from clock_timestamp() at time zone 'UTC');
end
$$;
"""
"""A function of the current time that is declared immutable although it is not.

So a test knows to which time a message is compared.
"""


def test_a_selector_matches_the_same_messages_in_every_session(q, elsewhere):
    q.execute(CLOCK)
    for name, selector in SAME.items():
        consumer(q, f"of_{name}", selector)
        make(q, f"copies_{name}")
        q.execute("select mbus.create_trigger('q', %s, %s)", [f"copies_{name}", selector])
    for number, session in enumerate([q, elsewhere], 1):
        session.execute(
            "select mbus.post('q', hstore(array['n', %s, 'f', '0.30000000000000004', 'b', '0001']), expires => %s, "
            "delayed_until => (clock_timestamp() - interval '1 second')::timestamp)",
            [str(number), ends(session)],
        )
    wanted = 'select id, cardinality(wanted) from mbus."all$q" order by id'
    every = 1 + len(SAME)
    assert q.execute(wanted).fetchall() == elsewhere.execute(wanted).fetchall() == [(1, every), (2, every)]
    for name in SAME:
        assert [consume(session, f"of_{name}") for session in (q, elsewhere)] == ["1", "2"], name
        assert sorted(drain(elsewhere, queue=f"copies_{name}")) == ["1", "2"], name


def test_a_new_consumer_has_what_is_in_the_queue_whoever_makes_it(q, elsewhere):
    q.execute(CLOCK)
    q.execute(
        "select mbus.post('q', 'n=>1, f=>0.30000000000000004, b=>0001', expires => %s, "
        "delayed_until => (clock_timestamp() - interval '1 second')::timestamp)",
        [ends(q)],
    )
    consumer(q, "keeps")
    assert consume(q) == "1"
    for name, selector in SAME.items():
        consumer(elsewhere, f"of_{name}", selector)
        assert consume(q, f"of_{name}") == "1", name


def test_a_dead_letter_is_judged_alike_in_every_session(q, elsewhere):
    q.execute(CLOCK)
    consumer(q, "c", SAME["added"])
    for session in (q, elsewhere):
        iid = post(session, 1)
        assert consume(session, "c") == "1"
        with session.transaction():
            assert consume(session) == "1"
            session.execute("select mbus.post_dmq('n=>1', iid => %s)", [iid])
        assert [letter.hindrance for letter in dead_letters.letters(elsewhere)] == [None]
        dead_letters.redrive(session, ids=[letter.id for letter in dead_letters.letters(session)])
        assert drain(session) == ["1"]
    assert there(q) == []


def test_times_of_messages_are_handed_out_in_the_time_zone_of_who_receives(q, elsewhere):
    consumer(q, "c", "t.added > '2020-01-01'")
    post(q, 1)
    ages = "select localtimestamp - added between '-1 minute' and '1 minute' from mbus.consume('q', %s)"
    assert one(elsewhere, ages, "c")
    assert one(q, ages, "default")


@pytest.fixture(scope="module")
def two_queues(shared):
    """A connection to a database with queues q and r, which refused calls leave as they are."""
    make(shared, "q", "r")
    yield shared
    assert shared.execute("select name from mbus.consumer").fetchall() == [("default",)] * 2
    assert one(shared, "select count(*) from mbus.trigger") == 0


MADE = {
    "consumer": "select mbus.create_consumer('c', 'q', %s)",
    "temporary consumer": "select mbus.create_temporary_consumer('q', %s)",
    "trigger": "select mbus.create_trigger('q', 'r', %s)",
}


@pytest.mark.parametrize("by", MADE)
@pytest.mark.parametrize(
    "selector",
    [
        "t.added > 'now'",
        "t.added > 'NOW'::timestamp",
        "t.added > 'today'",
        "t.added > timestamp 'yesterday'",
        "t.expires < 'tomorrow 10:00'",
        "t.added::date > 'today'",
        "t.added at time zone 'UTC' > 'now'",
        "t.added at time zone 'UTC' > 'today'",
        "t.added at time zone 'UTC' > '2026-01-01 00:00'",
        "t.added < '01/12/2026'",
        "t.added - interval '-1 2:03:04' > '2026-01-01'",
        "t.added <@ '[2026-01-01, now]'::tsrange",
        "t.added = any ('{now, 2026-01-01}'::timestamp[])",
        "localtime > '10:00'",
        "t.added::time > 'now'",
    ],
)
def test_a_time_that_is_another_one_in_another_session_is_refused(two_queues, selector, by):
    with pytest.raises(psycopg.Error, match="Wrong selector") as refused:
        two_queues.execute(MADE[by], [selector])
    assert "So it may depend on the message alone" in refused.value.diag.message_detail


@pytest.mark.parametrize(
    "selector",
    [
        "t.data->'n' in ('now', 'today', '01/12/2026')",
        "t.added > '2026-01-12' and t.added > timestamp '2026-01-12 10:00'",
        "t.added at time zone 'UTC' > '2026-01-01 00:00+00'",
        "t.added - interval '1 day 02:03' > 'epoch' and t.expires < 'infinity'",
        "t.added::date = date '2026-01-12'",
    ],
)
def test_a_time_that_is_written_out_is_none_of_them(elsewhere, q, selector):
    consumer(elsewhere, "c", selector)
    assert one(q, "select selector from mbus.consumer where name = 'c'") == selector
