"""Dropped tables of a tube after a restore.

A dump has only the oids of dropped tables. After a restore these oids can belong to other tables, which must not count
as attached.
"""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.admin import consumers
from tests import dumps
from tests.findings import findings
from tests.tubes import attach, detach, drain, make, one, touch, touched

STRANGERS = {
    "table": "create table private (id bigint not null, v text)",
    "index": "create table other (id bigint); create index private on other (id)",
    "view": "create view private as select 1::bigint as id",
    "attached elsewhere": "create table private (id bigint primary key); select tube.tube_ensure_exists('r');"
    "select tube.tube_table_ensure_attached('r', 'private', 5)",
}


def make_database(connection):
    """Create a tube with two attached tables, of which one was dropped."""
    make(connection)
    for name in ("item", "old"):
        connection.execute(f"create table {name} (id bigint primary key, v text)")
        attach(connection, name)


@pytest.fixture
def prepared_database():
    return make_database


@pytest.fixture
def connection(prepared_database, connect):
    return connect()


@pytest.fixture(params=STRANGERS)
def stranger(connection, request):
    """Drop the table ``old``, and let its oid belong to another relation."""
    number = one(connection, "select 'old'::regclass::oid")
    connection.execute("drop table old")
    connection.execute(STRANGERS[request.param])
    connection.execute("update tube.attachment set tbl = 'private'::regclass where tbl = %s", [number])
    return request.param


def attached_to(connection):
    return one(connection, "select tube.attached_to('q', 1, 0)")


def triggers(connection):
    return one(
        connection, "select count(*) from pg_trigger where tgrelid = 'private'::regclass and not tgisinternal"
    )


def test_a_table_that_has_the_number_of_a_dropped_one_is_not_captured(connection, stranger):
    before = triggers(connection)
    assert connection.execute("select * from tube.to_recapture()").fetchall() == []
    assert connection.execute("select tube.recapture()").fetchall() == []
    make(connection, predicate="id > 0")
    assert triggers(connection) == before
    assert [
        row[0] for row in connection.execute("select tbl::text from tube.tube_list() where tube = 'q'")
    ] == ["item"]
    assert [attached["name"] for attached in attached_to(connection)] == ["item"]


def test_a_dropped_table_is_reported_whatever_has_its_number_and_can_be_detached(connection, stranger):
    before = triggers(connection)
    [line] = [line for line in findings(connection, "tube") if "was dropped" in line]
    connection.execute(line[line.index("select tube") :])
    assert connection.execute("select tbl::text from tube.attachment where tube = 'q'").fetchall() == [
        ("item",)
    ]
    assert connection.execute("select from tube.detached").fetchall() == []
    assert findings(connection, "tube") == []
    assert triggers(connection) == before
    assert one(connection, "select count(*) from pg_proc where proname like 'pgchange_t%%'") == 4 + 4 * (
        stranger == "attached elsewhere"
    )


def test_detaching_forgets_the_shards_of_tables_that_were_dropped_since(connection):
    detach(connection, "old")
    connection.execute("drop table old")
    detach(connection, "item")
    assert connection.execute("select tbl::text from tube.detached").fetchall() == [("item",)]


def test_the_owner_of_the_pods_detaches_what_was_dropped_whoever_owns_what_has_its_number(
    connection, role, connect_to
):
    who = role("keeper")
    connection.execute("select tube.grant_owner(%s::regrole)", [who.name])
    connection.execute(
        f"grant usage, create on schema public to {who.name}; alter table q owner to {who.name}"
    )
    connection.execute("alter table old rename to gone; alter table gone rename to old; drop table old")
    connection.execute(
        "create table private (id bigint); update tube.attachment set tbl = 'private'::regclass "
        "where tbl not in (select oid from pg_class)"
    )
    keeper = connect_to(who.conninfo)
    keeper.execute("select tube.tube_table_ensure_detached('q', 'private')")
    assert connection.execute("select tbl::text from tube.attachment").fetchall() == [("item",)]


def test_a_table_that_has_the_number_of_a_dropped_one_can_be_attached_itself(connection):
    number = one(connection, "select 'old'::regclass::oid")
    connection.execute("drop table old; create table private (id bigint primary key)")
    connection.execute("update tube.attachment set tbl = 'private'::regclass where tbl = %s", [number])
    attach(connection, "private", shard=7)
    connection.execute("insert into private values (1)")
    assert touched(connection) == [1]
    assert connection.execute("select from tube.moved").fetchall() == []
    assert {each["name"]: each["shard"] for each in attached_to(connection)} == {"item": 0, "private": 7}


def test_a_backfill_of_many_tables_is_refused_for_what_has_the_number_of_a_dropped_one(connection):
    number = one(connection, "select 'old'::regclass::oid")
    connection.execute("drop table old; create table private (id bigint primary key)")
    connection.execute("update tube.attachment set tbl = 'private'::regclass where tbl = %s", [number])
    connection.execute("select tube.tube_backfill_schedule('q', 'id', 0, 0)")
    for seq, table in connection.execute("select seq, payload ->> 'tbl' from q").fetchall():
        if table == "public.private":
            with pytest.raises(psycopg.Error, match="private cannot be backfilled"):
                connection.execute("select tube.backfill_scheduled('q', 1, 0, %s)", [seq])
        else:
            connection.execute("select tube.backfill_scheduled('q', 1, 0, %s)", [seq])
    assert connection.execute("select tbl::text from tube.backfill").fetchall() == [("item",)]


def test_a_table_without_any_trigger_of_its_capture_is_mended(connection):
    for op in ("insert", "update", "delete", "truncate"):
        connection.execute(f"drop trigger item_q_after_{op}_trigger on item")
    assert "was repaired" in one(connection, "select tube.recapture()")
    connection.execute("insert into item values (1)")
    assert touched(connection) == [1]


@pytest.fixture
def lost(connection):
    """A tube whose pods were dropped. The oid of the pods now belongs to a table of the user."""
    make(connection, "gone")
    attach(connection, "item", "gone")
    number = one(connection, "select 'gone'::regclass::oid")
    connection.execute("drop table gone; create table precious (id bigint primary key, v int)")
    connection.execute("insert into precious values (1, 1)")
    connection.execute("update tube.tube set pods = 'precious'::regclass where pods = %s", [number])
    return connection


def test_removing_a_tube_drops_no_table_that_has_the_number_of_its_pods(lost):
    lost.execute("select tube.tube_ensure_absent('gone')")
    assert lost.execute("table precious").fetchall() == [(1, 1)]
    assert lost.execute("select name from tube.tube").fetchall() == [("q",)]


def test_a_tube_whose_pods_are_gone_stops_no_look_at_others(lost):
    touch(lost, 1)
    assert [row["feed"]["tube"] for row in consumers.status(lost)] == ["q"]
    assert [feed.tube for feed in tubes.ready(lost)] == ["q"]
    assert {tube for (tube,) in lost.execute("select tube from tube.tube_stats()")} == {"q"}
    assert {tube for (tube,) in lost.execute("select tube from tube.attachments()")} == {"q"}
    lost.execute("insert into tube.worker (tube, worker, control_attempt) values ('gone', 0, 9)")
    [told] = [line for line in findings(lost, "tube") if "tube gone" in line]
    assert "tube_ensure_absent('gone')" in told
    with pytest.raises(psycopg.Error, match="pods of tube gone is gone"):
        touch(lost, 1, tube="gone")


def test_a_write_neither_fails_nor_goes_into_a_table_that_has_the_number_of_the_pods(lost):
    notices = []
    lost.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    lost.execute("insert into item values (1); truncate item")
    assert lost.execute("table precious").fetchall() == [(1, 1)]
    assert any("tube gone cannot be written" in notice for notice in notices)


def test_a_table_that_has_the_number_of_pods_can_be_attached(lost):
    attach(lost, "precious")
    lost.execute("insert into precious values (2, 2)")
    assert touched(lost) == [2]


def test_a_keeper_clears_a_tube_away_whoever_owns_what_has_the_number_of_its_pods(lost, role, connect_to):
    who = role("keeper")
    lost.execute("select tube.grant_owner(%s::regrole)", [who.name])
    lost.execute("select tube.tube_table_ensure_detached('gone', 'item')")
    connect_to(who.conninfo).execute("select tube.tube_ensure_absent('gone')")
    assert lost.execute("select name from tube.tube").fetchall() == [("q",)]
    assert lost.execute("table precious").fetchall() == [(1, 1)]


@pytest.fixture
def dumped(db, bare_db, connect_to, cluster):
    """A function that restores parts of a dump one after the other, and returns a connection to the new database."""

    def restore(*parts):
        for options in parts:
            dumps.load(cluster, bare_db, dumps.dump(cluster, db, *options))
        return connect_to(bare_db)

    return restore


WITH_COMMENTS = pytest.mark.release("each other dump of these tests has its comments")


@pytest.mark.parametrize("options", [["--no-comments"], pytest.param([], marks=WITH_COMMENTS)])
def test_what_is_there_is_there_after_a_restore(connection, dumped, options):
    connection.execute("alter table item rename to thing; alter table q rename to pods")
    there = dumped(options)
    there.execute("insert into thing values (3); select tube.recapture(); insert into old values (4)")
    assert touched(there, "pods") == [3, 4]
    assert [row["feed"]["tube"] for row in consumers.status(there)] == ["q"]


def seqs(connection):
    return [seq for (seq,) in connection.execute("select seq from q order by seq")]


def load_over_triggers(connection, dumped):
    """Restore the schema first and then the data.

    The triggers capture the loaded rows, under seqs that pods of the dump also have.
    """
    connection.execute("insert into item select g from generate_series(1, 3) as g")
    for number in (1, 2, 3):
        connection.execute("delete from item where id = %s", [number])
    connection.execute("insert into item values (4); insert into old values (5)")
    # Load the rows after the tube itself, because captures look the tube up by its name.
    connection.execute("create schema zoo; create table zoo.beast (id bigint primary key)")
    connection.execute("insert into zoo.beast values (7), (8)")
    attach(connection, "zoo.beast")
    there = dumped(["-s"], ["-a"])
    assert len(seqs(there)) > len(set(seqs(there)))
    return there


def test_rows_loaded_over_triggers_and_later_rows_are_all_replayed(connection, dumped):
    there = load_over_triggers(connection, dumped)
    there.execute("select setval('tube.seq', 1)")
    there.execute("select tube.rebase_after_restore('q')")
    assert len(seqs(there)) == len(set(seqs(there)))
    there.execute("insert into item values (6)")
    assert one(there, "select ids from q order by seq desc limit 1") == [6]
    assert set(drain(there, limit=1)) == {1, 2, 3, 4, 5, 6, 7, 8}
    assert seqs(there) == []


def test_a_sequence_that_is_behind_the_pods_is_set_only_by_who_may(connection, role, connect_to):
    who = role("keeper")
    connection.execute("select tube.grant_owner(%s::regrole)", [who.name])
    connection.execute(
        f"grant usage, create on schema public to {who.name}; alter table q owner to {who.name}"
    )
    touch(connection, 1)
    touch(connection, 2)
    connection.execute("select setval('tube.seq', 1)")
    keeper = connect_to(who.conninfo)
    with pytest.raises(psycopg.Error, match="tube.seq is behind the pods of tube q") as told:
        keeper.execute("select tube.rebase_after_restore('q')")
    assert told.value.diag.message_hint.endswith("select tube.rebase_after_restore('q')")
    connection.execute("select tube.rebase_after_restore('q')")
    keeper.execute("select tube.rebase_after_restore('q')")
    assert one(connection, "select last_value = (select max(seq) from q) from tube.seq") is True


def test_a_tube_of_a_dump_without_data_is_made_again_as_the_error_says(connection, dumped):
    there = dumped(["-s"])
    with pytest.raises(psycopg.Error, match="there is a relation public.q already") as told:
        make(there)
    hint = told.value.diag.message_hint
    for command in ("drop table public.q", "drop function public.q_touch"):
        assert command in hint
        there.execute(command)
    make(there)
    attach(there)
    there.execute("insert into item values (1); select item_touch('{2}')")
    assert touched(there) == [1, 2]
    assert one(there, "select count(*) from pg_trigger where tgrelid = 'item'::regclass") == 4


def test_a_table_that_lost_the_column_of_its_ids_is_told_with_what_that_was_called(connection):
    connection.execute("alter table item drop column id")
    (told,) = [table for table in attached_to(connection) if table["name"] == "item"]
    assert told["key"] == ["id"]


def test_the_tubes_of_a_restored_dump_are_rebased_one_after_the_other(connect):
    """Each restored tube sets the sequence that all tubes share. If two did so at once, one could set it back."""
    first, second = connect(autocommit=False), connect()
    for name in ("p", "q"):
        make(second, name)
    first.execute("select tube.rebase_after_restore('p')")
    second.execute("set lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        second.execute("select tube.rebase_after_restore('q')")
    first.rollback()
    second.execute("select tube.rebase_after_restore('q')")
