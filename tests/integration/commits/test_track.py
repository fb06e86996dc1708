"""Tables of users whose rows are commits. Our triggers fail no write of a user."""

from __future__ import annotations

import psycopg
import pytest

from tests.commits import queued
from tests.limits import shorten_locks
from tests.tubes import one

CANNOT_TRACK = "PC008"


@pytest.fixture
def ledger(connect):
    connection = connect()
    connection.execute("create table ledger (id bigint primary key, kind text not null default 'a')")
    return connection


def refused(connection, call):
    with pytest.raises(psycopg.Error) as failure:
        connection.execute(f"select revision.track({call})")
    return failure.value


def test_each_row_is_a_commit_of_the_tables_own_branch(ledger):
    own = ledger.execute("select revision.track('ledger')").fetchone()[0]
    ledger.execute("insert into ledger values (7), (8)")
    assert queued(ledger) == [(7, own), (8, own)]
    assert ledger.execute("select type from revision.branch where id = %s", [own]).fetchone() == ("stable",)


def test_tracking_twice_changes_nothing(ledger):
    first = ledger.execute("select revision.track('ledger')").fetchone()
    assert ledger.execute("select revision.track('ledger')").fetchone() == first
    ledger.execute("insert into ledger values (1)")
    assert len(queued(ledger)) == 1


def test_a_table_tracked_again_has_the_same_branch(ledger):
    first = ledger.execute("select revision.track('ledger')").fetchone()
    ledger.execute("select revision.untrack('ledger')")
    ledger.execute("insert into ledger values (1)")
    assert queued(ledger) == []
    assert ledger.execute("select revision.track('ledger')").fetchone() == first


def test_an_expression_over_the_row_says_the_branch(ledger):
    ledger.execute("select revision.track('ledger', branch_id => $$case kind when 'a' then 0 end$$)")
    ledger.execute("insert into ledger values (1, 'a'), (2, 'b')")
    assert queued(ledger) == [(1, 0)]


def test_a_branch_that_does_not_exist_is_refused(ledger):
    assert refused(ledger, "'ledger', branch_id => '99'").sqlstate == "PC001"
    ledger.execute("insert into ledger values (1)")
    assert queued(ledger) == []


@pytest.mark.parametrize(
    ("ddl", "call", "says"),
    [
        ("create view v as select 1::bigint as id", "'v'", "not a table"),
        ("create temporary table t (id bigint primary key)", "'t'", "temporary"),
        ("create table t (id real primary key)", "'t'", "column id of public.t is real: equal values have"),
        ("create table t (id bigint unique)", "'t', '{id}'", "can be null"),
        ("create table t (id bigint not null)", "'t', '{id}'", "not unique"),
        ("create table t (a bigint)", "'t', '{id}'", "no column id"),
        ("create table t (a bigint)", "'t'", "give it a primary key or a unique index"),
        (
            "create table t (a bigint not null unique, b bigint)",
            "'t'",
            "name its key: revision.track('public.t', key => '{a}')",
        ),
        (
            "create table t (a int, b text, c int not null unique, primary key (b, a))",
            "'t', '{a}'",
            "to use the primary key, b, a; or name its key: revision.track('public.t', key => '{c}')",
        ),
        (
            "create table t (id uuid primary key)",
            "'t', branch_id => '0'",
            "the keys of branch 0 are bigint, and",
        ),
        ("create table t (id uuid primary key)", "'t', branch_id => '7 * 0'", "their keys are uuid"),
        (
            "create table t (id int, day int, primary key (id, day)) partition by range (day)",
            "'t', '{id}'",
            "column id of public.t is not unique",
        ),
        ("create table t (id bigint primary key)", "'t', branch_id => 'nonsense'", "does not return"),
        ("create table t (id bigint primary key)", "'t', branch_id => '''x'''", "does not return"),
        ("create table t (id bigint primary key)", "'t', branch_id => 'count(*)'", "does not return"),
        ("select 1", "'revision.commit'", "not a table of your own"),
        ("select 1", "null", "no such table"),
    ],
)
def test_an_invalid_argument_of_track_is_refused_with_the_reason(shared, ddl, call, says):
    with shared.transaction(force_rollback=True):
        shared.execute(ddl)
        error = refused(shared, call)
    assert error.sqlstate == CANNOT_TRACK
    assert says in str(error)


@pytest.mark.parametrize("type", ["smallint", "integer", "bigint", "percent"])
def test_the_key_is_the_primary_key_whatever_it_is_called_and_of_any_integer_type(shared, type):
    with shared.transaction(force_rollback=True):
        shared.execute(
            "create domain score as smallint check (value >= 0); create domain percent as score check (value <= 100);"
            f"create table t (id text, no {type} primary key); insert into t values ('a', 7)"
        )
        shared.execute("select revision.track('t')")
        shared.execute("insert into t values ('b', 8)")
        assert [commit for commit, _ in queued(shared)] == [8]
        shared.execute("select revision.enqueue_chunk('t', 10)")
        assert [commit for commit, _ in queued(shared)] == [8, 7]
        assert shared.execute(
            "select count(*) from pgchange.health() as h where h::text ~ 'key column'"
        ).fetchone() == (0,)
        shared.execute("alter table t rename no to number; select revision.track('t')")
        assert shared.execute("select key::text[] from revision.tracked").fetchone() == (["number"],)


def test_a_partitioned_table_is_captured_through_the_parent_and_through_its_partitions(connect):
    connection = connect()
    connection.execute("create table p (id integer primary key, day int) partition by range (id)")
    connection.execute("create table p1 partition of p for values from (1) to (10)")
    own = connection.execute("select revision.track('p')").fetchone()[0]
    connection.execute("insert into p values (1, 1)")
    connection.execute("insert into p1 values (2, 2)")
    assert queued(connection) == [(1, own), (2, own)]


def test_a_partition_that_came_later_is_named_and_then_captured(connect):
    connection = connect()
    connection.execute("create table p (id int, day int, primary key (id, day)) partition by range (day)")
    connection.execute("select revision.track('p')")
    connection.execute("create table p1 partition of p for values from (1) to (10)")
    assert connection.execute("select untriggered::text from revision.tracking()").fetchone() == ("{p1}",)
    connection.execute("select revision.recapture()")
    connection.execute("insert into p1 values (2, 2)")
    assert connection.execute("select untriggered::text from revision.tracking()").fetchone() == ("{}",)
    assert len(queued(connection)) == 1


def test_a_table_whose_capture_cannot_be_mended_is_told_and_keeps_no_other_from_it(connect):
    connection = connect()
    for table in ("a", "b", "c"):
        connection.execute(
            f"create table {table} (id int, day int, primary key (id, day)) partition by range (day);"
            f"select revision.track('{table}');"
            f"create table {table}1 partition of {table} for values from (1) to (10)"
        )
    connection.execute("drop trigger pgchange_capture on b; drop function pgchange_capture_b() cascade")
    told = {line for (line,) in connection.execute("select revision.recapture()")}
    assert told == {
        "public.a: the capture was placed on 1 partitions",
        "public.b: the capture cannot be placed on its partitions: function public.pgchange_capture_b() does not exist",
        "public.c: the capture was placed on 1 partitions",
    }


def test_an_inheritance_child_is_captured(ledger):
    ledger.execute("create table child () inherits (ledger)")
    ledger.execute("select revision.track('ledger')")
    ledger.execute("insert into child values (3)")
    assert [commit for commit, _ in queued(ledger)] == [3]


def test_an_expression_says_the_same_branch_in_every_session(ledger):
    """Without this check, a time without a zone or a day as text would mean something else to each writer."""
    ledger.execute("alter table ledger add at timestamptz default '2026-01-01 03:00Z'")
    early = "case when extract(hour from at) < 6 and at::text like '2026-01-01%' then 0 end"
    ledger.execute("insert into ledger (id) values (0)")
    ledger.execute("select revision.track('ledger', branch_id => %s)", [early])
    for row, (zone, style) in enumerate(
        [("UTC", "ISO, MDY"), ("Etc/GMT-6", "ISO, MDY"), ("UTC", "German")], 1
    ):
        ledger.execute(
            "select set_config('timezone', %s, false), set_config('datestyle', %s, false)", [zone, style]
        )
        ledger.execute("insert into ledger (id) values (%s)", [row])
    ledger.execute("call revision.enqueue_existing('ledger')")
    assert sorted(queued(ledger)) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_a_failing_expression_does_not_fail_the_write_and_is_replayed_when_mended(ledger):
    ledger.execute("create table divisor (n bigint)")
    ledger.execute("insert into divisor values (0)")
    ledger.execute("select revision.track('ledger', branch_id => '(select id / n * 0 from public.divisor)')")
    ledger.execute("insert into ledger values (1), (2)")
    assert queued(ledger) == []
    faults = ledger.execute("select commit_id, message from revision.fault order by id").fetchall()
    assert faults == [(1, "division by zero"), (2, "division by zero")]
    assert ledger.execute("select (pubsub.lag(0, '{}', 1, false) ->> 'faults')::int").fetchone() == (2,)
    ledger.execute("update divisor set n = 1")
    assert ledger.execute("select revision.replay_faults('ledger')").fetchone() == (2,)
    assert queued(ledger) == [(1, 0), (2, 0)]


def test_one_bad_row_of_a_statement_costs_only_itself(ledger):
    ledger.execute("select revision.track('ledger', branch_id => '(4 / (id - 2))::bigint * 0')")
    ledger.execute("insert into ledger values (1), (2), (3)")
    assert [commit for commit, _ in queued(ledger)] == [1, 3]
    assert ledger.execute("select commit_id from revision.fault").fetchall() == [(2,)]


@pytest.mark.parametrize("expression", ["null", "$$0$$", "'kind::text::bigint * 0'"])
def test_a_renamed_key_does_not_fail_the_write(ledger, expression):
    ledger.execute(f"select revision.track('ledger', branch_id => {expression})")
    ledger.execute("alter table ledger rename id to number")
    ledger.execute("insert into ledger values (5, '1')")
    assert [commit for commit, _ in queued(ledger)] == [5]
    assert ledger.execute("select key_renamed from revision.tracking()").fetchone() == (True,)


def test_a_key_that_changed_its_type_does_not_fail_the_write(ledger):
    ledger.execute("select revision.track('ledger')")
    ledger.execute("alter table ledger alter id type text")
    ledger.execute("insert into ledger values ('x')")
    assert ledger.execute("select count(*) from revision.fault").fetchone() == (1,)


def test_a_plain_writer_needs_rights_on_its_own_table_only(ledger, role):
    ledger.execute("select revision.track('ledger', branch_id => 'length(kind)::bigint * 0')")
    ledger.execute("create table plain (id bigint primary key)")
    ledger.execute("select revision.track('plain', branch_id => '0')")
    writer = role("writer")
    ledger.execute(f"grant insert on ledger, plain to {writer.name}")
    with psycopg.connect(writer.conninfo, autocommit=True) as connection:
        connection.execute("insert into ledger values (1)")
        connection.execute("insert into plain values (2)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("insert into revision.commit_queue (commit_id, branch_id) values (9, 0)")
    assert queued(ledger) == [(1, 0), (2, 0)]


def test_an_owner_tracks_its_table_and_no_other(ledger, role):
    owner = role("owner")
    ledger.execute(f"grant create on schema public to {owner.name}")
    with psycopg.connect(owner.conninfo, autocommit=True) as connection:
        connection.execute("create table mine (id bigint primary key)")
    ledger.execute("select revision.grant_owner(%s::regrole)", [owner.name])
    with psycopg.connect(owner.conninfo, autocommit=True) as connection:
        own = connection.execute("select revision.track('mine')").fetchone()[0]
        connection.execute("insert into mine values (1)")
        connection.execute("call revision.enqueue_existing('mine')")
        assert connection.execute("select revision.replay_faults('mine')").fetchone() == (0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="owner"):
            connection.execute("select revision.track('ledger')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(
                "insert into revision.commit_queue (commit_id, branch_id, txid) values (1, 0, '5')"
            )
        connection.execute("select revision.untrack('mine')")
    assert queued(ledger) == [(1, own)]


def test_an_expression_runs_with_the_rights_of_the_tables_owner(ledger, role):
    owner = role("owner")
    ledger.execute(f"grant create on schema public to {owner.name}")
    ledger.execute("create table secret (n bigint)")
    ledger.execute("select revision.grant_owner(%s::regrole)", [owner.name])
    with psycopg.connect(owner.conninfo, autocommit=True) as connection:
        connection.execute("create table mine (id bigint primary key)")
        assert "permission denied" in str(
            refused(connection, "'mine', branch_id => '(select n from public.secret)'")
        )


def test_an_expression_runs_as_the_owner_whoever_tracks_the_table(ledger, role):
    owner = role("owner")
    ledger.execute(f"grant create on schema public to {owner.name}")
    ledger.execute("select revision.grant_owner(%s::regrole)", [owner.name])
    ledger.execute("create table seen (who name)")
    ledger.execute(f"grant insert on seen to {owner.name}")
    ledger.execute(
        "create function note() returns bigint language plpgsql as "
        "$$ begin insert into public.seen values (current_user); return 0; end $$"
    )
    ledger.execute(f"alter table ledger owner to {owner.name}")
    ledger.execute("select revision.track('ledger', branch_id => 'public.note()')")
    ledger.execute("insert into ledger values (1)")
    assert queued(ledger) == [(1, 0)]
    assert ledger.execute("select distinct who from seen").fetchall() == [(owner.name,)]


def test_a_users_temporary_table_does_not_catch_the_events(ledger):
    ledger.execute("select revision.track('ledger')")
    ledger.execute("create temporary table commit_queue (commit_id bigint, branch_id bigint)")
    ledger.execute("insert into ledger values (1)")
    assert len(queued(ledger)) == 1


def test_users_prepared_transactions_go_on_working(ledger):
    ledger.execute("select revision.track('ledger', branch_id => 'length(kind)::bigint * 0')")
    ledger.execute("begin")
    ledger.execute("insert into ledger values (1)")
    ledger.execute("prepare transaction 'track-test'")
    assert queued(ledger) == []
    ledger.execute("commit prepared 'track-test'")
    assert queued(ledger) == [(1, 0)]


@pytest.mark.parametrize("expression", [None, "0", "length(kind)::bigint * 0"])
def test_a_write_takes_no_second_transaction_id(connect, expression):
    connection = connect()
    connection.execute("create table ledger (id bigint primary key, kind text not null default 'a')")
    connection.execute("select revision.track('ledger', branch_id => %s)", [expression])
    with connection.transaction():
        own = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()[0]
        for n in range(100):
            connection.execute("insert into ledger values (%s)", [n])
    following = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()[0]
    assert following - own < 100


def test_tracking_does_not_wait_for_a_writer_for_ever(ledger, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into ledger values (1)")
    shorten_locks(ledger)
    ledger.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being written"):
        ledger.execute("select revision.track('ledger')")
    assert ledger.execute("select count(*) from revision.tracked").fetchone() == (0,)


def test_untracking_does_not_wait_for_a_writer_for_ever_and_leaves_the_capture_whole(ledger, connect):
    ledger.execute("select revision.track('ledger')")
    writer = connect(autocommit=False)
    writer.execute("insert into ledger values (1)")
    shorten_locks(ledger)
    ledger.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being written"):
        ledger.execute("select revision.untrack('ledger')")
    writer.execute("insert into ledger values (2)")
    writer.commit()
    assert ledger.execute("select count(*) from revision.commit_queue").fetchone() == (2,)


def test_rows_that_were_there_before_come_in_chunks_and_none_is_doubled(ledger):
    ledger.execute("insert into ledger select g from generate_series(1, 25) as g")
    ledger.execute("select revision.track('ledger')")
    ledger.execute("insert into ledger values (-3), (30)")
    ledger.execute("update ledger set kind = 'b' where id <= 5")
    ledger.execute("call revision.enqueue_existing('ledger', 10)")
    ledger.execute("call revision.enqueue_existing('ledger', 10)")
    commits = [commit for commit, _ in queued(ledger)]
    assert sorted(commits) == [-3, *range(1, 26), 30]


@pytest.mark.parametrize("key", ["young", "key", "branch", "c", "item"])
def test_rows_that_were_there_before_come_in_chunks_of_their_keys_whatever_these_are_called(ledger, key):
    ledger.execute(
        f"create table item ({key} bigint primary key); insert into item select g from generate_series(25, 1, -1) as g"
    )
    ledger.execute(f"select revision.track('item', '{{{key}}}')")
    ledger.execute("select revision.enqueue_chunk('item', 10)")
    assert ledger.execute("select existing_upto from revision.tracked").fetchone() == ("10",)
    ledger.execute("call revision.enqueue_existing('item', 10)")
    assert sorted(commit for commit, _ in queued(ledger)) == list(range(1, 26))


def test_enqueueing_existing_rows_goes_on_where_it_stopped(ledger):
    ledger.execute("insert into ledger select g from generate_series(1, 25) as g")
    ledger.execute("select revision.track('ledger')")
    ledger.execute("select revision.enqueue_chunk('ledger', 10)")
    assert ledger.execute("select existing_upto, existing_done from revision.tracked").fetchone() == (
        "10",
        False,
    )
    ledger.execute("call revision.enqueue_existing('ledger', 10)")
    assert sorted(commit for commit, _ in queued(ledger)) == list(range(1, 26))


def test_an_existing_row_whose_branch_fails_is_a_fault_and_does_not_stop_the_rest(ledger):
    ledger.execute("insert into ledger select g from generate_series(1, 5) as g")
    ledger.execute("select revision.track('ledger', branch_id => '(4 / (id - 2))::bigint * 0')")
    ledger.execute("call revision.enqueue_existing('ledger', 100)")
    assert sorted(commit for commit, _ in queued(ledger)) == [1, 3, 4, 5]
    assert ledger.execute("select commit_id from revision.fault").fetchall() == [(2,)]


@pytest.mark.parametrize("expression", [None, "branch"])
def test_columns_may_have_any_name(connect, expression):
    connection = connect()
    connection.execute(
        "create table odd (commit bigint primary key, branch bigint, commits bigint, branches bigint, row_added bigint)"
    )
    own = connection.execute("select revision.track('odd', '{commit}', %s)", [expression]).fetchone()[0]
    connection.execute("insert into odd values (1, 0, 7, 8, 9), (2, 0, 7, 8, 9)")
    assert queued(connection) == [(1, own or 0), (2, own or 0)]
    assert connection.execute("select message from revision.fault").fetchall() == []


def test_a_table_that_was_dropped_and_created_again_can_be_tracked(connect):
    connection = connect()
    for _ in range(2):
        connection.execute("drop table if exists again; create table again (id bigint primary key)")
        branch = one(connection, "select revision.track('again')")
        connection.execute("insert into again values (1)")
        assert one(connection, "select count(*) from revision.commit_queue where branch_id = %s", branch) == 1
