"""The retention of the event log. Events that a reader still needs are kept, however old they are."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from tests.event_keeping import dispatch, drop_all, kept, lines, maintain, publish, read, subscribe
from tests.tubes import one

LATER = "5 hours"


@pytest.fixture
def log(connect):
    """A log with a group that reads everything."""
    connection = connect()
    subscribe(connection)
    return connection


def holders(connection):
    rows = connection.execute(
        "select reason, holder, events, oldest_event_id from pgmb.holders() order by 1, 2"
    ).fetchall()
    return [tuple(row) for row in rows]


def test_events_that_everybody_has_read_go_when_they_are_old(log):
    ids = publish(log, 3)
    dispatch(log)
    assert read(log) == ids
    maintain(log)
    assert kept(log) == ids
    assert any("emptied" in line and "events_" in line for line in maintain(log, LATER))
    assert kept(log) == []
    assert one(log, "select count(*) from pgmb.dispatched") == 0
    assert holders(log) == []


def test_events_that_nobody_subscribed_to_go_when_they_are_old(connect):
    connection = connect()
    publish(connection, 3)
    dispatch(connection)
    maintain(connection, LATER)
    assert kept(connection) == []


def test_events_that_a_group_has_not_read_stay_and_it_is_said_who_holds_them(log):
    subscribe(log, "quick")
    ids = publish(log, 3)
    dispatch(log)
    read(log, "quick")
    told = maintain(log, LATER)
    assert any("group g has not read it" in line for line in told)
    assert kept(log) == ids
    assert holders(log) == [("unread", "g", 3, ids[0])]
    assert read(log) == ids
    maintain(log, LATER)
    assert kept(log) == []


def test_a_group_that_stopped_in_the_middle_of_a_dispatch_keeps_the_rest(log):
    ids = publish(log, 5)
    dispatch(log)
    rows = log.execute("select id, next_cursor from pgmb.read_next_events('g', chunk_size => 2)").fetchall()
    log.execute("select pgmb.set_group_cursor('g', %s, true)", [rows[-1][1]])
    maintain(log, LATER)
    assert read(log) == ids[2:]


def test_a_group_that_was_set_back_holds_what_it_is_to_read_again(log):
    ids = publish(log, 2)
    dispatch(log)
    read(log)
    log.execute("select pgmb.set_group_cursor('g', pgmb.create_event_id(now() - interval '1 hour', 0), true)")
    maintain(log, LATER)
    assert read(log) == ids


def test_undispatched_events_stay(log):
    ids = publish(log, 3)
    told = maintain(log, LATER)
    assert any("not all in it is dispatched" in line for line in told)
    assert holders(log) == [("undispatched", None, 3, ids[0])]
    dispatch(log)
    assert read(log) == ids


def test_scheduled_events_stay_until_their_time_has_come(log):
    ids = publish(log, 3, at="now() + interval '2 hours'")
    maintain(log, "9 hours")
    assert kept(log) == ids
    assert holders(log) == [("undispatched", None, 3, ids[0])]


def test_events_with_an_old_id_are_delivered_and_go_when_they_are_read(log):
    ids = publish(log, 3, at="now() - interval '3 days'")
    maintain(log)
    assert kept(log) == ids
    dispatch(log)
    told = maintain(log)
    assert any("kept old rows of" in line and "group g" in line for line in told)
    assert read(log) == ids
    assert any("deleted 3 rows" in line for line in maintain(log))
    assert kept(log) == []


def test_the_holder_of_rows_in_the_default_partition_is_named(log):
    ids = publish(log, 3, at="now() - interval '3 days'")
    dispatch(log)
    assert holders(log) == [("unread", "g", 3, ids[0])]
    assert log.execute("select partition::text, reason from pgmb.overdue()").fetchall() == [
        ("pgmb.events_default", "group g has not read it")
    ]


def test_an_event_that_is_needed_keeps_nothing_of_another_time_in_the_default_partition(log):
    publish(log, 3, at="now() - interval '3 days'")
    dispatch(log)
    read(log)
    needed = publish(log, 1, at="now() - interval '2 days'")
    assert any("deleted 3 rows" in line for line in maintain(log))
    assert kept(log) == needed


def test_a_group_keeps_nothing_of_the_default_partition_for_what_it_has_not_read_of_another(log):
    publish(log, 3, at="now() - interval '3 days'")
    dispatch(log)
    read(log)
    subscribe(log, "behind")
    unread = publish(log, 1)
    dispatch(log)
    assert any("deleted 3 rows" in line for line in maintain(log, LATER))
    assert kept(log) == unread


def test_nobody_waits_for_who_makes_a_group_anew_and_does_not_commit(log, connect):
    drop_all(log, "pgmb.dispatched")
    publish(log)
    dispatch(log)
    log.execute("select pgmb.drop_consumer('g')")
    other = connect(autocommit=False)
    subscribe(other)
    log.execute("set statement_timeout = '20s'")
    trim = "select pgmb.trim_partitions('pgmb.dispatched', now() + interval '5 hours')"
    assert lines(log, trim) == ["postponed the old rows of dispatched_default: some are in use"]
    other.commit()
    assert lines(log, trim) == []
    assert one(log, "select count(*) from pgmb.dispatched") == 0


def test_the_holder_of_an_event_with_the_last_possible_time_is_named(log):
    event = "pm" + 13 * "f" + "000000001"
    log.execute("insert into pgmb.events (id, topic, payload) values (%s, 't', '{}')", [event])
    log.execute("set statement_timeout = '20s'")
    assert holders(log) == [("undispatched", None, 1, event)]


def test_an_event_for_which_a_condition_failed_stays(log):
    subscription = subscribe(log, "h", conditions_sql="1 / (e.payload ->> 'n')::int > 0")
    (event,) = publish(log)
    log.execute("update pgmb.events set payload = %s", [Jsonb({"n": 0})])
    dispatch(log)
    read(log)
    maintain(log, LATER)
    assert kept(log) == [event]
    assert holders(log) == [("fault", "h", 1, event)]
    log.execute("delete from pgmb.subscriptions where id = %s", [subscription])
    maintain(log, LATER)
    assert kept(log) == []


def test_events_that_are_to_be_read_again_stay_for_the_retry(log):
    (subscription,) = log.execute("select id from pgmb.subscriptions").fetchone()
    ids = publish(log, 2)
    dispatch(log)
    read(log)
    log.execute(
        "insert into pgmb.events (id, topic, payload, subscription_id) "
        "values (pgmb.create_event_id(now() + interval '2 days', 0), 'pgmb-retry', %s, %s)",
        [Jsonb({"ids": ids[:1], "retryNumber": 1, "handlerName": "h"}), subscription],
    )
    maintain(log, LATER)
    assert set(ids) < set(kept(log))
    assert ("retry", "g", 1, ids[0]) in holders(log)
    log.execute("delete from pgmb.subscriptions")
    maintain(log, LATER)
    assert not set(ids) & set(kept(log))


def test_events_stay_for_a_retry_that_is_dispatched_and_unread_and_go_when_it_is_read(log):
    (subscription,) = log.execute("select id from pgmb.subscriptions").fetchone()
    ids = publish(log, 2)
    dispatch(log)
    read(log)
    log.execute(
        "insert into pgmb.events (topic, payload, subscription_id) values ('pgmb-retry', %s, %s)",
        [Jsonb({"ids": ids, "retryNumber": 1, "handlerName": "h"}), subscription],
    )
    dispatch(log)
    assert {row[:3] for row in holders(log)} >= {("retry", "g", 2)}
    maintain(log, LATER)
    assert set(ids) < set(kept(log))
    read(log)
    maintain(log, LATER)
    assert kept(log) == []


def test_whether_a_partition_may_go_does_not_cost_more_with_what_is_unread(log):
    def pages() -> int:
        plan = one(
            log, "explain (analyze, buffers, format json) select pgmb.holder_of('pgmb.events', 'pm0', 'pm1')"
        )
        return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])

    publish(log, 10)
    dispatch(log)
    pages()
    few = pages()
    publish(log, 10_000)
    dispatch(log)
    assert min(pages() for _ in range(3)) <= few + 200


def test_unread_events_of_a_group_are_not_read_for_each_of_its_retries(log):
    (subscription,) = log.execute("select id from pgmb.subscriptions").fetchone()

    def pages() -> int:
        plan = one(
            log, "explain (analyze, buffers, format json) select pgmb.holder_of('pgmb.events', 'pm0', 'pm1')"
        )
        return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])

    log.execute(
        "insert into pgmb.events (topic, payload, subscription_id) "
        "select 'pgmb-retry', jsonb_build_object('ids', jsonb_build_array('pm0' || n)), %s "
        "from generate_series(1, 500) as n",
        [subscription],
    )
    dispatch(log)
    read(log)
    # Repeat the query until PostgreSQL uses its generic plan.
    few = [pages() for _ in range(8)][-1]
    publish(log, 3000)
    dispatch(log)
    assert min(pages() for _ in range(3)) <= few + 500


def test_the_holder_of_a_partition_is_found_without_reading_earlier_unread_events(log):
    def pages() -> int:
        lower = one(log, "select pgmb.create_event_id(clock_timestamp(), 0)")
        publish(log)
        dispatch(log)
        upper = one(log, "select pgmb.create_event_id(clock_timestamp(), 0)")
        query = f"select pgmb.holder_of('pgmb.events', '{lower}', '{upper}')"
        assert one(log, query) == "group g has not read it"
        (top,) = one(log, f"explain (analyze, buffers, format json) {query}")
        return int(top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"])

    # Repeat the query until PostgreSQL uses its generic plan.
    few = [pages() for _ in range(8)][-1]
    publish(log, 50_000)
    dispatch(log)
    assert min(pages() for _ in range(3)) <= few + 50


def test_an_event_that_is_not_dispatched_holds_its_own_partition_and_no_later_one(log):
    (id,) = publish(log)
    holds = "select pgmb.holder_since('pgmb.events', '{}', 'pm9', '1:1:')".format
    assert one(log, holds(id)) == "not all in it is dispatched"
    assert one(log, holds(one(log, "select pgmb.create_event_id(clock_timestamp(), 0)"))) is None


@pytest.mark.parametrize("payload", ["{}", '{"ids": null}', '{"ids": 5}', "[]", "null", '{"ids": [null, 3]}'])
def test_a_retry_event_that_names_nothing_troubles_nobody(log, payload):
    (subscription,) = log.execute("select id from pgmb.subscriptions").fetchone()
    publish(log)
    log.execute(
        "insert into pgmb.events (id, topic, payload, subscription_id) "
        f"values (pgmb.create_event_id(now() + interval '2 hours', 0), 'pgmb-retry', '{payload}', %s)",
        [subscription],
    )
    dispatch(log)
    read(log)
    assert any("emptied" in line for line in maintain(log, LATER))


def test_a_restored_copy_lets_nothing_go_before_it_has_dispatched(log):
    publish(log)
    dispatch(log)
    read(log)
    ids = publish(log)
    log.execute("update pgmb.origin set written_in = '3'")
    assert any("it was restored here" in line for line in maintain(log, LATER))
    assert kept(log)[-1:] == ids
    dispatch(log)
    assert read(log) == ids


def test_dispatches_that_a_group_has_not_read_stay(log):
    ids = publish(log, 3)
    dispatch(log)
    told = lines(log, "select pgmb.trim_partitions('pgmb.dispatched', now() + interval '5 hours')")
    assert any("group g has not read it" in line for line in told)
    assert read(log) == ids
