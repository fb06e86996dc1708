"""Errors in the delivery of an event are recorded, and do not delay other subscriptions."""

from __future__ import annotations

import threading

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import schema
from airflow_pgchange.admin.maintenance import maintain as maintenance
from airflow_pgchange.errors import DispatchEnded, PermissionDenied
from airflow_pgchange.events.dispatch import dispatch
from tests.event_keeping import maintain
from tests.events import TOPICAL, drain, faults, poll, poll_all, publish, read, subscribe
from tests.findings import findings
from tests.tubes import one
from tests.waiting import sleeps, until

PARTITIONED = (
    "s.params @> jsonb_build_object('topics', jsonb_build_array(e.topic)) and pgmb.event_partition("
    "coalesce(e.payload ->> (s.params ->> 'by'), e.id), (s.params ->> 'partitions')::integer) = "
    "(s.params ->> 'partition')::integer"
)


@pytest.fixture
def gone(connect):
    """The id of a removed subscription of group g. The group has another subscription."""
    connection = connect()
    subscribe(connection, "g", "false")
    sid = subscribe(connection, "g", TOPICAL, {"topic": "a"})
    connection.execute("delete from pgmb.subscriptions where id = %s", [sid])
    return sid


def come_back(connection, sid):
    connection.execute(
        "insert into pgmb.subscriptions (id, group_id, conditions_sql) values (%s, 'g', 'FALSE')", [sid]
    )


def test_a_message_to_a_subscription_that_is_gone_is_told_and_holds_up_nobody(connect, gone):
    connection = connect()
    other = subscribe(connection, "h")
    [astray] = publish(connection, "t", to=gone)
    [direct] = publish(connection, "t", to=other)
    assert poll(connection) == 1
    assert [row["id"] for row in read(connection, "h")] == [direct]
    [(sid, ids, message)] = faults(connection)
    assert (sid, ids) == (gone, [astray])
    assert "deleted" in message
    assert any("a subscription that does not exist" in line for line in maintenance(connection).attention)


def test_a_retry_for_a_subscription_that_is_gone_when_its_time_comes_is_told(connect):
    connection = connect()
    sid = subscribe(connection)
    events = Jsonb([{"id": "pm" + "0" * 22, "topic": "a", "payload": {}, "metadata": {}}])
    retry = one(connection, "select pgmb.retry_events(%s, 'mail', %s, 'it failed', 1, '0')", [sid], events)
    connection.execute("delete from pgmb.subscriptions where id = %s", [sid])
    poll_all(connection)
    assert [fault[:2] for fault in faults(connection)] == [(sid, [retry])]


def test_a_replay_delivers_events_to_a_subscription_that_exists_again(connect, gone):
    connection = connect()
    [astray] = publish(connection, "t", to=gone)
    poll_all(connection)
    assert one(connection, "select pgmb.replay_faults()") == 0
    assert len(faults(connection)) == 1
    come_back(connection, gone)
    assert one(connection, "select pgmb.replay_faults('g')") == 1
    assert [row["id"] for row in read(connection)] == [astray]
    assert faults(connection) == []


def test_faults_that_nobody_can_mend_any_more_go_with_their_events(connect, gone):
    connection = connect()
    failing = subscribe(connection, "h", "1 / (e.payload ->> 'n')::int = 1")
    publish(connection, "t", to=gone)
    publish(connection, "t", payload={"n": 0})
    poll_all(connection)
    maintain(connection)
    assert len(faults(connection)) == 2
    assert "deleted 1 faults of deleted subscriptions" in maintain(connection, "5 hours")
    assert [sid for sid, _, _ in faults(connection)] == [failing]


def test_a_subscription_that_fails_on_everything_takes_no_event_from_the_others_of_its_condition(connect):
    connection = connect()
    fine = {"topics": ["t"], "by": "of", "partition": 0, "partitions": 1}
    bad = subscribe(connection, "bad", PARTITIONED, {**fine, "partitions": 0})
    subscribe(connection, "good", PARTITIONED, fine)
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 300) as g"
    )
    assert poll(connection) == 300
    assert len(drain(connection, "good", 5000)) == 300
    assert {sid for sid, _, _ in faults(connection)} == {bad}
    assert sum(len(ids) for _, ids, _ in faults(connection)) == 300


def test_a_condition_that_is_more_than_an_expression_is_refused_and_never_run(connect):
    connection = connect()
    connection.execute("create sequence public.ran")
    for smuggling in (
        "true]::boolean[]; select nextval('public.ran'); select array[true",
        "true); select nextval('public.ran'); select (true",
        "true; select nextval('public.ran')",
    ):
        with pytest.raises(psycopg.Error, match="cannot be used") as refused:
            subscribe(connection, "g", smuggling)
        assert refused.value.sqlstate == "PC008", smuggling
        assert one(connection, "select is_called from public.ran") is False, smuggling


def test_a_condition_runs_with_the_rights_of_the_owner_whoever_polls(connect, role, connect_to):
    connection = connect()
    consumer = role("consumer")
    connection.execute("select pgmb.grant_consumer(%s::regrole)", [consumer.name])
    connection.execute("create table public.seen (who text)")
    connection.execute(
        "create function public.note() returns boolean language plpgsql as "
        "'begin insert into public.seen values (current_user); return true; end'"
    )
    subscribe(connection, "g", "public.note() and e.topic = 'a'")
    publish(connection, "a")
    assert poll(connect_to(consumer.conninfo)) == 1
    owner = one(connection, "select nspowner::regrole::text from pg_namespace where nspname = 'pgmb'")
    assert one(connection, "select array_agg(distinct who) from public.seen") == [owner]


def test_side_effects_of_a_condition_that_fails_are_undone(connect):
    connection = connect()
    connection.execute("create table public.seen (topic text)")
    connection.execute(
        "create function public.note(topic text) returns boolean language plpgsql as "
        "'begin insert into public.seen values (topic); return 1 / (topic <> ''b'')::int = 1; end'"
    )
    subscribe(connection, "g", "public.note(e.topic) and e.payload is not null")
    ids = publish(connection, "a", "b", "c")
    assert drain(connection) == [ids[0], ids[2]]
    assert connection.execute("select topic from public.seen order by 1").fetchall() == [("a",), ("c",)]


@pytest.mark.parametrize(
    ("setting", "conditions"),
    [
        ("standard_conforming_strings = off", r"e.payload ->> 'at' = '2026-02-01\n'"),
        ("transform_null_equals = on", "(e.payload ->> 'none' = null) is null and e.topic = 'a'"),
        ("timezone = 'Asia/Tokyo'", "(e.payload ->> 'day')::timestamptz = '2026-02-01 00:00+00'"),
        ("datestyle = 'German, DMY'", "(e.payload ->> 'slashes')::date = date '2026-02-01'"),
    ],
)
def test_a_condition_means_the_same_whoever_polls(connect, setting, conditions):
    connection = connect()
    subscribe(connection, "g", conditions)
    payload = {"at": r"2026-02-01\n", "day": "2026-02-01 00:00", "slashes": "02/01/2026"}
    ids = publish(connection, "a", payload=payload)
    other = connect()
    try:
        other.execute(f"set {setting}")
    except psycopg.errors.InvalidParameterValue:
        assert connection.info.server_version >= 190000
    assert poll(other) == 1
    assert [row["id"] for row in read(connection)] == ids


def test_names_are_data_whatever_is_in_them(connect):
    connection = connect()
    hostile = "x'); drop table pgmb.events; --\"$1%s"
    group = hostile[:40]
    subscribe(connection, group, TOPICAL, {"topic": hostile})
    ids = publish(connection, hostile, "other")
    poll_all(connection)
    assert [row["id"] for row in read(connection, group)] == ids[:1]
    connection.execute("select pgmb.drop_consumer(%s)", [group])
    assert one(connection, "select count(*) from pgmb.events") == 2


def test_a_chunk_of_no_size_is_refused_and_takes_no_lock(connect):
    connection = connect()
    subscribe(connection)
    for size in ("0", "-1", "null"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="at least 1 event"):
            connection.execute(f"select * from pgmb.read_next_events('g', null, {size})")
    assert one(connection, "select pgmb.locked('g')") is False


def busy(connection):
    """Hold a lock on the events that is not released."""
    connection.execute("begin; lock table pgmb.events in access exclusive mode")


def lacking(connection):
    connection.execute("delete from pgmb.events where topic = 'a'")


@pytest.mark.parametrize(
    ("prepare", "setting", "state"),
    [
        (busy, "set statement_timeout = '500ms'", "57014"),
        (busy, "set lock_timeout = '100ms'", "55P03"),
        (lacking, "select", "55000"),
    ],
    ids=["cancelled", "not waiting", "events gone"],
)
def test_a_read_that_fails_lets_go_of_the_lock_that_it_took(connect, prepare, setting, state):
    connection, reader = connect(), connect()
    subscribe(connection)
    publish(connection, "a", "b")
    poll_all(connection)
    prepare(connection)
    reader.execute(setting)
    with pytest.raises(psycopg.DatabaseError) as failed:
        read(reader, peek=False)
    assert failed.value.sqlstate == state
    assert one(connection, "select pgmb.locked('g')") is False


def test_a_read_that_fails_keeps_the_lock_of_the_one_before(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a", "b")
    poll_all(connection)
    assert len(read(connection, chunk=1, peek=False)) == 1
    lacking(connection)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        read(connection, peek=False)
    assert one(connection, "select pgmb.held_here('g')") is True


@pytest.mark.parametrize("most", [0, -1, 1_000_001])
def test_a_poll_of_no_events_or_of_more_than_memory_may_hold_is_refused(unchanged, most):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="1 to 1000000"):
        unchanged.execute("select pgmb.dispatch(%s)", [most])


def test_nobody_gets_into_the_capture_of_anothers_table_by_a_trigger(connect, role, connect_to):
    connection = connect()
    connection.execute("create table public.item (id bigint primary key)")
    connection.execute("select pgmb.push_table_mutations('public.item', update => false)")
    intruder = role("intruder")
    connection.execute(f"create schema theirs authorization {intruder.name}")
    connection.execute(f"grant trigger on public.item to {intruder.name}")
    there = connect_to(intruder.conninfo)
    there.execute("create table theirs.bait (id bigint)")
    there.execute(
        "create function theirs.capture() returns trigger language plpgsql as 'begin return null; end'"
    )
    for table in ("public.item", "theirs.bait"):
        there.execute(
            f"create trigger pgmb_push_update after update on {table} "
            "for each statement execute function theirs.capture()"
        )
    ours = one(
        connection, "select function::regproc::text from pgmb.pushes('public.item') where op = 'insert'"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        there.execute(
            "create trigger pgmb_push_insert after insert on theirs.bait "
            f"for each statement execute function {ours}()"
        )
    tables = connection.execute("select distinct relid::text from pgmb.pushes('public.item')").fetchall()
    assert tables == [("item",)]
    assert connection.execute("select updates from pgmb.pushing()").fetchall() == [(False,)]


def test_the_log_works_without_superuser_and_without_an_extension(bare_db, role, connect_to):
    admin, owner = connect_to(bare_db), role("owner")
    admin.execute(f"grant create on database {admin.info.dbname} to {owner.name}")
    connection = connect_to(psycopg.conninfo.make_conninfo(bare_db, user=owner.name))
    try:
        schema.install(connection, ["pgmb"])
        subscribe(connection)
        ids = publish(connection, "a", "b")
        assert drain(connection) == ids
        assert connection.execute("select extname from pg_extension").fetchall() == [("plpgsql",)]
    finally:
        admin.execute(f"drop owned by {owner.name} cascade")


@pytest.fixture
def endless(connect):
    """A condition of group slow that does not end."""
    connection = connect()
    connection.execute(
        "create function public.endless(topic text) returns boolean language plpgsql as "
        "'begin loop perform pg_sleep(1); end loop; end'"
    )
    return subscribe(connection, "slow", "public.endless(e.topic)")


def test_a_condition_that_does_not_end_is_ended_and_named_and_loses_nothing(connect, endless):
    connection = connect()
    subscribe(connection, "other")
    ids = publish(connection, "a", "b")
    with pytest.raises(DispatchEnded, match=r"'public\.endless\(e\.topic\)' of slow: .*timeout"):
        dispatch(connection, timeout=2)
    connection.execute("delete from pgmb.subscriptions where id = %s", [endless])
    assert dispatch(connection).pairs == 2
    assert [row["id"] for row in read(connection, "other")] == ids


def test_the_error_of_a_cancelled_poll_names_the_condition(connect, endless, db):
    connection = connect()
    publish(connection, "a")
    caught = []

    def work():
        with psycopg.connect(db, autocommit=True) as dispatching:
            try:
                dispatching.execute("select pgmb.poll_for_events()")
            except psycopg.Error as error:
                caught.append(str(error))

    dispatching = threading.Thread(target=work)
    dispatching.start()
    until(connection, sleeps())
    connection.execute("select pg_cancel_backend(at_work) from pgmb.dispatching()")
    dispatching.join()
    assert "public.endless" in caught[0]


def test_maintenance_names_the_process_that_holds_dispatching_up(connect):
    connection, holding = connect(), connect(autocommit=False)
    publish(connection, "a")
    holding.execute("select pg_advisory_xact_lock(pgmb.dispatch_key())")
    assert maintenance(connection).attention == []
    (line,) = findings(connection, "pgmb", "0")
    assert f"pg_cancel_backend({holding.info.backend_pid})" in line
    holding.rollback()
    assert findings(connection, "pgmb", "0") == []


def test_what_failed_is_not_dispatched_again_at_a_level_that_hides_the_latest_poll(connect):
    connection, strict = connect(), connect(autocommit=False)
    sid = subscribe(connection, "g", "1 / (length(e.topic) - 1) > 0")
    ids = publish(connection, "a")
    poll_all(connection)
    connection.execute("update pgmb.subscriptions set conditions_sql = 'TRUE' where id = %s", [sid])
    strict.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.DatabaseError, match="read committed"):
        strict.execute("select pgmb.replay_faults('g')")
    assert one(connection, "select pgmb.replay_faults('g')") == 1
    assert drain(connection) == ids


def test_a_command_that_is_suggested_for_a_group_is_one_whatever_its_name_is(connect):
    connection = connect()
    subscribe(connection, "o'brien", "1 / (length(e.topic) - 1) > 0")
    publish(connection, "a")
    (line,) = maintenance(connection).attention
    assert "select pgmb.replay_faults('o''brien')" in line


def test_an_error_about_a_missing_right_names_the_grants_of_the_log(connect_to, role):
    with pytest.raises(PermissionDenied, match=r"pgmb\.grant_dispatcher"):
        dispatch(connect_to(role("nobody").conninfo))


def test_conditions_that_nobody_uses_any_more_cost_a_poll_nothing(connect):
    connection = connect()
    subscribe(connection)

    def pages() -> int:
        publish(connection, "a")
        plan = one(connection, "explain (analyze, buffers, format json) select pgmb.poll_for_events()")
        return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])

    pages()
    few = pages()
    connection.execute("alter table pgmb.condition disable trigger added")
    connection.execute(
        "insert into pgmb.condition (conditions_sql) select 'e.topic = ' || g from generate_series(1, 10000) as g"
    )
    connection.execute("analyze pgmb.condition, pgmb.subscriptions")
    assert min(pages() for _ in range(3)) <= few + 50
