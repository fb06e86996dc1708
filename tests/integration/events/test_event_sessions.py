"""The delivery of events does not depend on the settings of a session, a role or a database."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import maintenance
from airflow_pgchange.events import Event, Handler, Selection, publish, subscribe, topical
from airflow_pgchange.feeds import EventFeed
from tests.events import drain, faults, poll, read, work_all
from tests.handling import Seen, group, numbered, subscribed
from tests.streaming import numbers, serving
from tests.tubes import one
from tests.web import listening

DEFAULT = "alter database {} set {} = {}"


def set_for_all(connect, setting, value):
    """Change a setting of the database, and return a new session, which has it."""
    connection = connect()
    connection.execute(DEFAULT.format(one(connection, "select current_database()"), setting, value))
    connection.close()
    return connect()


@pytest.mark.parametrize(
    ("setting", "conditions"),
    [
        ("standard_conforming_strings = off", "e.topic = 't'"),
        ("default_text_search_config = 'simple'", "to_tsvector(e.payload ->> 'x') @@ to_tsquery('run')"),
        ("extra_float_digits = -10", "((e.payload ->> 'f')::float8)::text = '1.2345678901234567'"),
        ("bytea_output = 'escape'", r"(decode('00', 'hex'))::text = '\x00' and e.topic = 't'"),
        ("quote_all_identifiers = on", "quote_ident(e.topic) = 't'"),
        ("array_nulls = off", "('{NULL}'::text[])[1] is null and e.topic = 't'"),
    ],
)
def test_a_condition_means_the_same_whoever_polls(connect, setting, conditions):
    connection, other = connect(), connect()
    subscribe(connection, "g", Selection(conditions))
    publish(connection, Event("t", {"x": "running", "f": 1.2345678901234567}))
    other.execute(f"set {setting}")
    poll(other)
    assert (len(read(connection)), faults(connection)) == (1, [])


def test_no_subscription_is_left_out_where_searches_are_cut_short(connect):
    connection = connect()
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        "select 'g' || n, %s, '{\"topics\": [\"t\"]}' from generate_series(1, 500) as n",
        [topical("t").conditions],
    )
    connection.execute("set gin_fuzzy_search_limit = 10")
    publish(connection, numbered(0, 1))
    assert poll(connection) == 500


def test_topics_are_known_where_a_backslash_is_an_escape(connect):
    connection = connect()
    connection.execute("set standard_conforming_strings = off")
    subscribe(connection, "g", topical("t"))
    subscribe(connection, "h", Selection("e.topic = 't'"))
    assert drain(connection) == []
    known = (
        "select bool_and(c.by_params or c.by_topic) from pgmb.condition as c "
        "join pgmb.subscriptions as s on s.condition_id = c.id"
    )
    assert one(connection, known)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_any_default_isolation_will_do(db, connect, level):
    connection = set_for_all(connect, "default_transaction_isolation", f"'{level}'")
    subscribed(connection)
    subscribe(connection, "h", topical("t"))
    publish(connection, numbered(0, 5))
    assert len(work_all(db, feed=EventFeed("h"))) == 5
    publish(connection, numbered(5, 10))
    seen = Seen()
    group(db, Handler("h", seen)).run("empty")
    assert seen.numbers == list(range(10))
    assert maintenance.maintain(connection).failed == []


def test_streams_deliver_where_transactions_are_serializable(db, connect):
    connection = set_for_all(connect, "default_transaction_isolation", "'serializable'")
    with serving(db) as serve:
        _, address = serve()
        with listening(f"{address}/t") as client:
            publish(connection, numbered(0, 3))
            assert numbers(client.events(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("setting", "column", "value", "said"),
    [
        ("extra_float_digits = -10", "double precision", "1.2345678901234567", "1.2345678901234567"),
        ("bytea_output = 'escape'", "bytea", r"'\xff'", r"\xff"),
        ("intervalstyle = 'iso_8601'", "interval", "'1 day'", "1 day"),
        ("datestyle = 'German'", "daterange", "'[2026-01-02,2026-01-03)'", "[2026-01-02,2026-01-03)"),
    ],
)
def test_a_row_says_the_same_whoever_writes_it(connect, setting, column, value, said):
    connection = connect()
    connection.execute(f"create table item (id int primary key, x {column})")
    connection.execute("select pgmb.push_table_mutations('item')")
    connection.execute(f"set {setting}")
    connection.execute(f"insert into item values (1, {value})")
    assert one(connection, "select payload ->> 'x' from pgmb.events") == said
