"""Our triggers fail no write of a user, however hostile the table, the expression or the moment."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.commits import narrow_partitions, queued

EXPRESSIONS = pytest.mark.parametrize("expression", [None, "0", "length(kind)::bigint * 0"])


def captured(connection):
    return [commit for commit, _ in queued(connection)]


def faults(connection):
    return connection.execute("select commit_id, message from revision.fault order by id").fetchall()


@pytest.fixture
def ledger(connect):
    connection = connect()
    connection.execute("create table ledger (id bigint primary key, kind text not null default 'a')")
    return connection


def track(connection, expression, table="ledger"):
    query = "select revision.track(%s, branch_id => %s)"
    return connection.execute(query, [table, expression]).fetchone()[0] or 0


@EXPRESSIONS
def test_a_write_for_which_there_is_no_partition_goes_through_and_is_captured(ledger, expression):
    track(ledger, expression)
    for (partition,) in ledger.execute("select relid from revision.partitions()").fetchall():
        ledger.execute(f"drop table {partition}")
    ledger.execute("insert into ledger values (1)")
    assert captured(ledger) == [1]


@EXPRESSIONS
def test_a_dropped_key_is_a_fault_and_does_not_fail_the_write(ledger, expression):
    own = track(ledger, expression)
    ledger.execute("alter table ledger drop column id")
    ledger.execute("insert into ledger values ('a'), ('b')")
    assert [commit for commit, _ in faults(ledger)] == [None, None]
    assert all("key column" in message for _, message in faults(ledger))
    assert ledger.execute("select (pubsub.lag(%s, '{}', 1, false) ->> 'faults')::int", [own]).fetchone() == (
        2,
    )
    with pytest.raises(psycopg.Error, match="its key column was dropped") as refused:
        ledger.execute("select revision.replay_faults('ledger')")
    assert refused.value.sqlstate == "PC008"


def test_a_fault_counts_for_its_own_branch_with_those_of_partitions_and_up_to_a_thousand(connect):
    connection = partitioned(connect)
    own = connection.execute("select revision.track('p')").fetchone()[0]
    connection.execute("create table other (id bigint primary key)")
    others = connection.execute("select revision.track('other')").fetchone()[0]
    note = (
        "insert into revision.fault (tbl, commit_id, message) "
        "select %s::regclass, g, '' from generate_series(1, %s) as g"
    )
    connection.execute(note, ["p1", 3])
    connection.execute(note, ["other", 1001])
    lags = connection.execute(
        "select pubsub.lags(jsonb_agg(jsonb_build_object('branch_id', b, 'position', '{}'::jsonb, 'upto', 1, "
        "'in_order', false) order by n)) from unnest(%s::bigint[]) with ordinality as u(b, n)",
        [[own, others, 0]],
    ).fetchone()[0]
    assert [lag["faults"] for lag in lags] == [3, 1000, 0]
    assert connection.execute("select tbl::text, faults from revision.tracking() order by 1").fetchall() == [
        ("other", 1000),
        ("p", 3),
    ]


def test_a_failed_assertion_in_an_expression_does_not_fail_the_write(ledger):
    ledger.execute(
        "create function place(kind text) returns bigint language plpgsql as "
        "$$ begin assert kind = 'a', 'no place for it'; return 0; end $$"
    )
    track(ledger, "public.place(kind)")
    ledger.execute("insert into ledger values (1, 'a'), (2, 'b')")
    assert captured(ledger) == [1]
    assert faults(ledger) == [(2, "no place for it")]
    ledger.execute(
        "create or replace function place(kind text) returns bigint language sql as 'select 0::bigint'"
    )
    assert ledger.execute("select revision.replay_faults('ledger')").fetchone() == (1,)


def test_a_fault_that_fails_again_stays_a_fault(ledger):
    ledger.execute(
        "create function place(kind text) returns bigint language plpgsql as "
        "$$ begin assert kind = 'a', 'no place for it'; return 0; end $$"
    )
    ledger.execute("insert into ledger values (1, 'a'), (2, 'b')")
    track(ledger, "public.place(kind)")
    ledger.execute("call revision.enqueue_existing('ledger')")
    assert faults(ledger) == [(2, "no place for it")]
    assert ledger.execute("select revision.replay_faults('ledger')").fetchone() == (0,)
    assert faults(ledger) == [(2, "no place for it")]


def test_a_timeout_that_strikes_inside_an_expression_fails_the_write_and_captures_nothing(ledger):
    track(ledger, "(select 0::bigint from pg_sleep(length(kind) - 1))")
    ledger.execute("insert into ledger values (1, 'a')")
    ledger.execute("set statement_timeout = '200ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        ledger.execute("insert into ledger values (2, 'slow as can be')")
    ledger.execute("set statement_timeout = 0")
    assert captured(ledger) == [1]
    assert faults(ledger) == []
    assert ledger.execute("select id from ledger").fetchall() == [(1,)]


def test_an_expression_does_not_read_a_writers_temporary_table(ledger):
    track(ledger, "(select min(id) from branch)")
    ledger.execute("create temporary table branch (id bigint)")
    ledger.execute("insert into ledger values (1)")
    assert queued(ledger) == [(1, 0)]


def test_an_expression_means_at_the_write_what_it_meant_when_it_was_checked(ledger):
    ledger.execute("create table branch (id bigint)")
    ledger.execute("insert into branch values (7)")
    track(ledger, "(select min(id) from branch)")
    ledger.execute("insert into ledger values (1)")
    assert queued(ledger) == [(1, 0)]


@pytest.mark.parametrize("name", ["commit_queue", "fault", "branch"])
def test_commits_do_not_go_astray_in_a_users_temporary_table(connect, name):
    connection = connect()
    connection.execute("insert into revision.branch (type) values ('approved')")
    connection.execute(
        f"create temporary table {name} (id bigint, commit_id bigint, branch_id bigint, type text)"
    )
    connection.execute("insert into revision.commit (state) values ('draft'), ('approved')")
    connection.execute("update revision.commit set state = 'approved'")
    assert len(queued(connection)) == 4


@pytest.mark.parametrize("way", ["type", "operator"])
@EXPRESSIONS
def test_a_writer_cannot_make_the_capture_run_code_of_his_own(ledger, role, way, expression):
    track(ledger, expression)
    # A renamed key column makes the capture take its slow path.
    ledger.execute("alter table ledger rename id to number")
    writer = role("writer")
    ledger.execute(f"grant insert on ledger to {writer.name}")
    ledger.execute(f"create schema own authorization {writer.name}")
    with psycopg.connect(writer.conninfo, autocommit=True) as connection:
        connection.execute(
            "create table own.seen (who name); grant all on own.seen to public; grant usage on schema own to public"
        )
        connection.execute(
            "create function own.note(a anyelement) returns boolean language plpgsql as "
            "$$ begin insert into own.seen values (current_user); return true; end $$"
        )
        if way == "type":
            for name in ("record", "text", "jsonb", "name"):
                connection.execute(
                    f"create domain own.{name} as pg_catalog.text check (own.note(value::pg_catalog.text))"
                )
        else:
            connection.execute(
                "create function own.get(a jsonb, b text) returns text language sql as "
                "$$ select case when own.note(b) then '1' end $$"
            )
            connection.execute(
                "create operator own.->> (leftarg = jsonb, rightarg = text, function = own.get)"
            )
        connection.execute("set search_path = own, pg_catalog, public")
        connection.execute("insert into public.ledger values (5, 'a')")
    assert captured(ledger) == [5]
    assert ledger.execute("select who from own.seen").fetchall() == []


@pytest.mark.parametrize("expression", [None, "0 * 7"])
def test_names_may_hold_anything(connect, expression):
    connection = connect()
    for turn, name in enumerate(["it's", "100%", 'a "b"', "$constant$", "Größe", "select"], 1):
        quoted = psycopg.sql.Identifier(name)
        connection.execute(psycopg.sql.SQL("create table {0} ({0} bigint primary key)").format(quoted))
        table = quoted.as_string(connection)
        connection.execute("select revision.track(%s, %s::text[]::name[], %s)", [table, [name], expression])
        connection.execute(psycopg.sql.SQL("insert into {} values ({})").format(quoted, turn))
        connection.execute(psycopg.sql.SQL("alter table {0} rename column {0} to other").format(quoted))
        connection.execute(psycopg.sql.SQL("insert into {} values ({})").format(quoted, -turn))
        assert captured(connection)[-2:] == [turn, -turn], name
    assert len(captured(connection)) == 2 * turn
    assert faults(connection) == []


@EXPRESSIONS
def test_copy_with_freeze_is_captured_with_its_own_transaction(ledger, expression):
    track(ledger, expression)
    with ledger.transaction():
        ledger.execute("truncate ledger")
        own = ledger.execute("select pg_current_xact_id()::text").fetchone()
        with ledger.cursor().copy("copy ledger from stdin with (freeze)") as copy:
            copy.write("1\ta\n2\tb\n")
    assert captured(ledger) == [1, 2]
    assert ledger.execute("select distinct txid::text from revision.commit_queue").fetchone() == own
    ledger.execute("call revision.enqueue_existing('ledger')")
    assert captured(ledger) == [1, 2]


@EXPRESSIONS
def test_a_captured_write_can_be_prepared(ledger, expression):
    track(ledger, expression)
    ledger.execute("begin")
    ledger.execute("insert into ledger values (1)")
    ledger.execute("prepare transaction 'capture'")
    assert queued(ledger) == []
    ledger.execute("commit prepared 'capture'")
    assert captured(ledger) == [1]


def test_a_commit_can_be_prepared(connect):
    connection = connect()
    connection.execute("insert into revision.branch (type) values ('approved')")
    connection.execute("begin")
    connection.execute("insert into revision.commit default values")
    connection.execute("update revision.commit set state = 'approved'")
    connection.execute("prepare transaction 'commit'")
    connection.execute("commit prepared 'commit'")
    assert len(queued(connection)) == 2


@EXPRESSIONS
def test_a_row_is_captured_once_in_whatever_way_it_is_inserted(ledger, expression):
    track(ledger, expression)
    ledger.execute("insert into ledger select g from generate_series(1, 3) as g where g > 5")
    ledger.execute("insert into ledger values (1), (2)")
    ledger.execute("insert into ledger values (2), (3) on conflict do nothing")
    ledger.execute("insert into ledger values (3), (4) on conflict (id) do update set kind = 'b'")
    ledger.execute(
        "with w as (insert into ledger values (5) returning id) insert into ledger select id + 1 from w"
    )
    ledger.execute(
        "merge into ledger as t using (values (6::bigint), (7)) as s(id) on t.id = s.id "
        "when matched then update set kind = 'c' when not matched then insert values (s.id)"
    )
    assert sorted(captured(ledger)) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("state", ["disable", "enable replica"])
def test_a_disabled_capture_captures_nothing_and_is_named(ledger, state):
    track(ledger, None)
    ledger.execute("create table other (id bigint primary key); select revision.track('other')")
    ledger.execute(f"alter table ledger {state} trigger pgchange_capture")
    ledger.execute("insert into ledger values (1)")
    assert queued(ledger) == []
    named = ledger.execute("select tbl::text, disabled::text from revision.tracking() order by 1").fetchall()
    assert named == [("ledger", "{ledger}"), ("other", "{}")]


def test_rows_written_as_a_replica_are_not_captured(ledger):
    track(ledger, None)
    ledger.execute("set session_replication_role = replica")
    ledger.execute("insert into ledger values (1)")
    ledger.execute("set session_replication_role = origin")
    ledger.execute("insert into ledger values (2)")
    assert captured(ledger) == [2]


@pytest.mark.parametrize("state", ["draft", "approved"])
def test_a_writer_of_commits_needs_rights_on_them_only(connect, role, state):
    connection = connect()
    connection.execute("insert into revision.branch (type) values ('approved')")
    writer = role("editor")
    connection.execute(f"grant usage on schema revision to {writer.name}")
    connection.execute(f"grant select, insert, update on revision.commit to {writer.name}")
    with psycopg.connect(writer.conninfo, autocommit=True) as editor:
        editor.execute("insert into revision.commit (state) values (%s)", [state])
        editor.execute("update revision.commit set state = 'approved'")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            editor.execute("insert into revision.commit_queue (commit_id, branch_id) values (1, 0)")
    assert len(queued(connection)) == 2


def test_public_may_not_touch_the_queue(connect, role):
    stranger = role("stranger")
    with psycopg.connect(stranger.conninfo, autocommit=True) as connection:
        for attempt in (
            "insert into revision.commit_queue (commit_id, branch_id) values (1, 0)",
            "select from revision.commit_queue",
            "select pubsub.lock_watermark('stranger', 0)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(attempt)


@EXPRESSIONS
def test_a_partition_with_its_columns_in_another_order_is_captured(connect, expression):
    connection = partitioned(connect)
    own = track(connection, expression, "p")
    connection.execute("create table p3 (kind text not null default 'a', id bigint not null)")
    connection.execute("alter table p attach partition p3 for values from (20) to (30)")
    connection.execute("insert into p (id) values (20)")
    connection.execute("select revision.recapture()")
    connection.execute("insert into p3 (id) values (21)")
    assert queued(connection) == [(20, own), (21, own)]


def test_a_full_table_that_is_attached_is_named_and_its_rows_are_not_captured(connect):
    connection = partitioned(connect)
    track(connection, None, "p")
    connection.execute("create table p3 (like p including defaults)")
    connection.execute("insert into p3 (id) values (20)")
    connection.execute("alter table p attach partition p3 for values from (20) to (30)")
    assert connection.execute("select untriggered::text from revision.tracking()").fetchone() == ("{p3}",)
    assert queued(connection) == []


@EXPRESSIONS
def test_partitions_come_while_writers_write(connect, expression):
    connection = partitioned(connect)
    track(connection, expression, "p")
    connection.execute("create table p_rest partition of p default")
    connection.execute("select revision.recapture()")
    done, errors, written = threading.Event(), [], []

    def write(number):
        writer, n = connect(), 0
        try:
            while not done.is_set() or n < 20:
                n += 1
                commit = -n if number == 1 else 1_000_000 + n
                writer.execute("insert into p (id) values (%s)", [commit])
                written.append(commit)
        except psycopg.Error as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in writers:
        thread.start()
    for low in (100, 110, 120):
        connection.execute(f"create table p{low} (like p including all)")
        connection.execute(f"alter table p attach partition p{low} for values from ({low}) to ({low + 10})")
        connection.execute("select revision.recapture()")
        connection.execute(f"insert into p{low} (id) values ({low})")
        written.append(low)
    done.set()
    for thread in writers:
        thread.join()
    assert errors == []
    assert sorted(captured(connection)) == sorted(written)


@EXPRESSIONS
def test_a_lock_on_the_queue_that_readers_or_maintenance_take_does_not_stop_a_writer(
    ledger, connect, expression
):
    track(ledger, expression)
    holder = connect(autocommit=False)
    ledger.execute("set lock_timeout = '1s'")
    for number, mode in enumerate(["share update exclusive", "row exclusive", "access share"]):
        holder.execute(f"lock table revision.commit_queue in {mode} mode")
        ledger.execute("insert into ledger values (%s)", [number])
        holder.rollback()
    assert captured(ledger) == [0, 1, 2]


def test_tracking_one_table_does_not_stop_writers_of_another(ledger, connect):
    track(ledger, None)
    tracking = connect(autocommit=False)
    tracking.execute("create table other (id bigint primary key)")
    tracking.execute("select revision.track('other')")
    ledger.execute("set lock_timeout = '1s'")
    ledger.execute("insert into ledger values (1)")
    assert captured(ledger) == [1]


@EXPRESSIONS
def test_a_write_that_is_rolled_back_leaves_no_event(ledger, expression):
    track(ledger, expression)
    with ledger.transaction(force_rollback=True):
        ledger.execute("insert into ledger values (1)")
    ledger.execute("insert into ledger values (2)")
    assert captured(ledger) == [2]


def test_many_rows_of_which_one_fails_are_captured_one_by_one(ledger):
    track(ledger, "(4 / (id - 700))::bigint * 0")
    ledger.execute("insert into ledger select g from generate_series(1, 2000) as g")
    assert captured(ledger) == [n for n in range(1, 2001) if n != 700]
    assert faults(ledger) == [(700, "division by zero")]


def test_a_write_that_spans_partitions_of_the_queue_is_whole(ledger):
    track(ledger, None)
    narrow_partitions(ledger, 3)
    for n in range(20):
        ledger.execute("insert into ledger values (%s)", [n])
    assert captured(ledger) == list(range(20))


def partitioned(connect):
    connection = connect()
    connection.execute(
        "create table p (id bigint primary key, kind text not null default 'a') partition by range (id)"
    )
    connection.execute("create table p1 partition of p for values from (minvalue) to (10)")
    return connection
