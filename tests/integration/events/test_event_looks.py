"""Views of the log for people: the reader of a group, its unread partitions, and the cost of these queries."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.feeds.queries import records
from airflow_pgchange.plugins.event_log import SPANS
from tests.event_keeping import drop_all, maintain
from tests.events import TOPICAL, poll_all, publish, publish_at, read, subscribe, take
from tests.tubes import one

Connection = psycopg.Connection[Any]

ALL_TIME = "pgmb.unread_by('-infinity', 'infinity')"
SHOWN = (SPANS, {"upto": 1, "most": 50})
"""The query by which the page reads the partitions."""


def unread(connection: Connection, upto: int = 1000) -> list[tuple[Any, ...]]:
    query = "select group_id, events, exact from pgmb.unread_by('-infinity', 'infinity', %s)"
    return connection.execute(query, [upto]).fetchall()


def pages(connection: Connection, query: str) -> int:
    """Return the buffers that a query reads."""
    explained = f"explain (analyze, buffers, format json) {query}"
    plan = [one(connection, explained)[0]["Plan"] for _ in range(2)][1]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def until_waiting(connection: Connection, other: Connection) -> None:
    """Wait until another session waits for a lock."""
    deadline = time.monotonic() + 30
    while not one(connection, "select pg_blocking_pids(%s) <> '{}'", other.info.backend_pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_process_that_reads_a_group_is_named_while_it_does(connect):
    connection, reader = connect(), connect()
    subscribe(connection)
    publish(connection, "t")
    poll_all(connection)
    assert one(connection, "select reader from pgmb.groups()") is None
    assert read(reader, peek=False)
    assert one(connection, "select reader from pgmb.groups()") == reader.info.backend_pid


def test_a_group_shows_how_far_it_has_read(connect):
    connection = connect()
    subscribe(connection)
    assert one(connection, "select read_upto from pgmb.groups()") is None
    publish(connection, "t")
    poll_all(connection)
    assert take(connection)
    assert one(
        connection, "select read_upto between now() - interval '1 minute' and now() from pgmb.groups()"
    )


def test_a_group_shows_the_topics_and_parts_that_it_chose(connect):
    connection = connect()
    subscribe(connection, params={"topics": ["a", "b"], "partition": 1, "partitions": 4})
    subscribe(connection, "g", TOPICAL, {"topic": "c"})
    subscribe(connection, "g", params={"anything": {"topics": 1}})
    found = connection.execute("select subscriptions, topics, parts from pgmb.groups()").fetchall()
    assert found == [(3, ["a", "b", "c"], ["1 of 4"])]


@pytest.mark.parametrize("part", ["private", "1" * 21, ["1"], -1, None])
def test_a_part_is_told_only_where_it_is_a_number_of_a_few_digits(connect, part):
    connection = connect()
    subscribe(connection, params={"partition": part, "partitions": 4})
    subscribe(connection, "g", params={"partition": 1, "partitions": part})
    subscribe(connection, "g", params={"partition": "3", "partitions": "4"})
    assert one(connection, "select parts from pgmb.groups()") == ["3 of 4"]


@pytest.mark.parametrize(("grant", "topics"), [("dispatcher", []), ("consumer", ["secret"])])
def test_only_who_may_read_subscriptions_is_told_what_they_choose(connect, role, connect_to, grant, topics):
    connection = connect()
    subscribe(connection, params={"topic": "secret"})
    who = role("looker")
    connection.execute(f"select pgmb.grant_{grant}(%s::regrole)", [who.name])
    assert one(connect_to(who.conninfo), "select topics from pgmb.groups()") == topics


def test_unread_events_are_counted_once_whatever_subscriptions_chose_them(connect):
    connection = connect()
    subscribe(connection)
    subscribe(connection, "g", TOPICAL, {"topic": "t"})
    subscribe(connection, "other")
    publish(connection, *["t"] * 300)
    poll_all(connection)
    assert unread(connection) == [("g", 300, True), ("other", 300, True)]
    assert len(take(connection, chunk=290)) == 290
    assert unread(connection)[0] == ("g", 10, True)
    take(connection)
    assert unread(connection) == [("other", 300, True)]


def test_a_group_keeps_the_partitions_from_its_first_unread_event_on(connect):
    connection = connect()
    drop_all(connection)
    for minutes in (120, 60, 0):
        maintain(connection, f"-{minutes} min")
    subscribe(connection)
    publish_at(connection, "now() - interval '61 min'")
    poll_all(connection)
    kept = "select consumer from pgmb.kept(array['events:g', 'events:other']) where bytes > 2 ^ 30"
    for minutes, told in ((0, []), (110, []), (61, [("events:g",)])):
        # Pretend that the partition of that time has 3 GB.
        connection.execute(
            "update pg_class set relpages = 393216 where oid = pgmb.get_current_partition("
            "'pgmb.events'::regclass, now() - make_interval(mins => %s))",
            [minutes],
        )
        assert connection.execute(kept).fetchall() == told
    take(connection)
    assert connection.execute(kept).fetchall() == []


def test_a_count_that_is_cut_off_is_shown_as_a_minimum(connect):
    connection = connect()
    subscribe(connection)
    for _ in range(3):
        publish(connection, "t")
        poll_all(connection)
    assert unread(connection, upto=2) == [("g", 2, False)]


def test_unread_events_are_counted_in_the_partition_of_their_dispatch(connect):
    connection = connect()
    maintain(connection)
    subscribe(connection)
    publish(connection, "t")
    poll_all(connection)
    found = connection.execute(
        "select s.place, u.events from (select lower, upper from pgmb.partitions() where state = 'current') as p "
        "cross join lateral (values ('before', '-infinity', p.lower), ('in it', p.lower, p.upper), "
        "('after', p.upper, 'infinity')) as s(place, lower, upper) "
        "left join lateral pgmb.unread_by(s.lower, s.upper) as u on true"
    ).fetchall()
    assert found == [("before", None), ("in it", 1), ("after", None)]


def test_nothing_less_than_an_event_is_counted_up_to(connect):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="upto must be at least 1 event"):
        connect().execute(f"select {ALL_TIME.replace(')', ', 0)')}")


def test_partitions_are_old_when_what_is_read_in_them_is_not_kept_any_more(connect):
    connection = connect()
    maintain(connection, "-2 days")
    maintain(connection)
    states = "select array_agg(distinct state) from pgmb.partitions() where upper < now() - interval '1 day'"
    current = "select state from pgmb.partitions() where now() >= lower and now() < upper"
    assert (one(connection, states), one(connection, current)) == (["old"], "current")
    connection.execute("update pgmb.config set value = '7 days' where id = 'partition_retention_period'")
    assert (one(connection, states), one(connection, current)) == (["recent"], "current")


@pytest.mark.parametrize(("query", "values"), [("select * from pgmb.partitions()", None), SHOWN])
def test_a_partition_that_is_dropped_during_a_look_has_no_size(connect, query, values):
    connection, looker, maintainer = connect(), connect(), connect(autocommit=False)
    maintain(connection, "-2 days")
    old = one(connection, "select partition::text from pgmb.partitions() where state = 'old' order by lower")
    # Whether the default partition has rows is queried after the bounds were read, and before any size is measured.
    maintainer.execute("lock table pgmb.events_default")
    with ThreadPoolExecutor(1) as threads:
        look = threads.submit(records, looker, query, values)
        until_waiting(connection, looker)
        maintainer.execute(f"drop table {old}")
        maintainer.commit()
        sizes = [row["bytes"] for row in look.result(30)]
    assert (sizes.count(0), None in sizes) == (1, False)


@pytest.mark.parametrize(("query", "values"), [("select * from pgmb.spans()", None), SHOWN])
def test_only_a_partition_that_is_shown_is_measured(connect, query, values):
    connection, holder = connect(), connect(autocommit=False)
    maintain(connection)
    (index,) = connection.execute(
        "select indexrelid::regclass::text from pg_index where indisprimary and indrelid = "
        "(select partition from pgmb.partitions() where state = 'ahead' order by lower limit 1)"
    ).fetchone()
    holder.execute(f"reindex index {index}")
    connection.execute("set lock_timeout = '200ms'")
    with pytest.raises(ConsumerBusy):
        records(connection, "select * from pgmb.partitions()")
    assert records(connection, query, values)


def test_the_default_partition_is_shown_where_it_holds_something(connect):
    connection = connect()
    drop_all(connection)
    shown = "select partition::text, lower, upper = 'infinity' from pgmb.partitions()"
    assert connection.execute(shown).fetchall() == []
    publish_at(connection, "now() - interval '1 year'")
    whole = "select partition::text, lower = '-infinity', upper = 'infinity' from pgmb.partitions()"
    assert connection.execute(whole).fetchall() == [("pgmb.events_default", True, True)]


def test_looking_at_groups_and_partitions_does_not_cost_more_with_backlog_or_history(connect):
    connection = connect()
    maintain(connection)
    subscribe(connection)
    subscribe(connection, "behind")
    looks = [
        "pgmb.groups()",
        "pgmb.spans()",
        "pgmb.partitions()",
        ALL_TIME.replace(")", ", 10)"),
        "pgmb.dispatching()",
    ]

    def cost() -> list[int]:
        return [pages(connection, f"select * from {look}") for look in looks]

    def dispatch_to(groups: list[str], n: int) -> None:
        connection.execute(
            "insert into pgmb.dispatched "
            "select pgmb.cursor_at(pgmb.micros((pgmb.dispatcher_now()).last_id) - n, 1), g, 'su0', '{pm0}', true, 0 "
            "from generate_series(1, %s) as n cross join unnest(%s::text[]) as g",
            [n, groups],
        )

    publish(connection, "t")
    poll_all(connection)
    take(connection)
    dispatch_to(["g", "behind"], 100)
    few = cost()
    dispatch_to(["g", "behind"], 20_000)
    publish(connection, *["t"] * 5000)
    many = cost()
    assert all(more <= 2 * before + 20 for before, more in zip(few, many, strict=True)), (few, many)
