"""The key of a tracked table, from which its commits get their ids, and changes of its column."""

from __future__ import annotations

import psycopg
import pytest

from tests import dumps
from tests.commits import queued
from tests.limits import shorten_locks
from tests.tubes import one

EXPRESSIONS = pytest.mark.parametrize("expression", [None, "length(kind)::bigint * 0"])


@pytest.fixture
def ledger(connect):
    connection = connect()
    connection.execute("create table ledger (id bigint primary key, kind text not null default 'a')")
    return connection


def track(connection, expression=None, table="ledger", key=None):
    connection.execute("select revision.track(%s, %s::name[], %s)", [table, key, expression])


def captured(connection):
    return [commit for commit, _ in queued(connection)]


def found(connection):
    """Return the findings of health about tracked tables."""
    return [told for (told,) in connection.execute("select told from revision.health()").fetchall()]


def refresh(connection):
    return [line for (line,) in connection.execute("select revision.recapture()").fetchall()]


NULLABLE = "alter table ledger drop constraint ledger_pkey; alter table ledger alter id drop not null"
REPLACED = "alter table ledger rename id to old_id; alter table ledger add id bigint default 7"


@EXPRESSIONS
def test_a_row_without_a_key_is_a_fault_and_no_commit_and_the_others_of_its_statement_are_captured(
    ledger, expression
):
    track(ledger, expression)
    ledger.execute(NULLABLE)
    ledger.execute("insert into ledger values (1), (null), (2)")
    assert captured(ledger) == [1, 2]
    faults = ledger.execute("select commit_id, message from revision.fault").fetchall()
    assert faults == [(None, "its key is null")]


@EXPRESSIONS
def test_a_row_without_a_key_does_not_fail_the_write_of_a_session_without_row_security(
    ledger, role, connect_to, expression
):
    owner = role("owner")
    ledger.execute("select revision.grant_owner(%s::regrole)", [owner.name])
    ledger.execute(f"grant create on schema public to {owner.name}; alter table ledger owner to {owner.name}")
    session = connect_to(owner.conninfo)
    track(session, expression)
    session.execute(NULLABLE)
    session.execute("set row_security = off")
    session.execute("insert into ledger values (null)")
    assert one(ledger, "select message from revision.fault") == "its key is null"


def test_a_row_without_a_key_that_an_expression_puts_nowhere_is_no_fault(ledger):
    track(ledger, "case when id is not null then 0 end")
    ledger.execute(NULLABLE)
    ledger.execute("insert into ledger values (null), (1)")
    assert (captured(ledger), one(ledger, "select count(*) from revision.fault")) == ([1], 0)


def test_rows_without_a_key_are_told_until_the_owner_has_dealt_with_them(ledger):
    track(ledger)
    ledger.execute(NULLABLE)
    ledger.execute("insert into ledger values (null)")
    call = one(ledger, "select call from revision.health() where told like '%%without a key, in no commit%%'")
    ledger.execute("alter table ledger disable trigger pgchange_capture; delete from ledger")
    ledger.execute(
        "alter table ledger enable trigger pgchange_capture; alter table ledger add primary key (id)"
    )
    ledger.execute(call[call.index("delete") :])
    assert found(ledger) == []


@EXPRESSIONS
def test_a_key_that_was_renamed_is_captured_though_another_column_got_its_name(ledger, expression):
    track(ledger, expression)
    often = range(10, 20)  # After five executions PostgreSQL may keep a generic plan.
    for key in often:
        ledger.execute("insert into ledger values (%s)", [key])
    ledger.execute(REPLACED)
    ledger.execute("insert into ledger (old_id) values (1)")
    assert refresh(ledger) == ["public.ledger: its key is captured as old_id"]
    ledger.execute("insert into ledger (old_id) values (2)")
    assert captured(ledger) == [*often, 1, 2]
    assert found(ledger) == []


MEANWHILE = {
    "another column got its name": (
        "alter table ledger add n bigint",
        "alter table ledger rename id to old_id; alter table ledger rename n to id",
        "old_id",
    ),
    "another column took its place": (
        "alter table ledger add n bigint not null default 0",
        "alter table ledger drop constraint ledger_pkey; alter table ledger rename id to old_id; "
        "alter table ledger rename n to id; alter table ledger alter old_id set default -1; "
        "alter table ledger add primary key (id)",
        "id",
    ),
    "it was renamed": ("", "alter table ledger rename id to old_id", "old_id"),
}


@EXPRESSIONS
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_repeatable_read_transaction_captures_the_key_by_the_name_that_it_has_now(
    ledger, connect, expression, meanwhile
):
    before, changed, key = MEANWHILE[meanwhile]
    ledger.execute(before)
    track(ledger, expression)
    writer = connect(autocommit=False)
    writer.execute("set transaction isolation level repeatable read")
    writer.execute("select from revision.tracked")
    ledger.execute(changed)
    writer.execute(f"insert into ledger ({key}) values (1)")
    writer.commit()
    assert captured(ledger) == [1]


def test_a_key_that_a_repeatable_read_transaction_cannot_tell_is_a_fault(ledger, connect):
    ledger.execute(
        "alter table ledger drop constraint ledger_pkey; alter table ledger add unique (id); "
        "alter table ledger add n bigint"
    )
    track(ledger, key="{id}")
    writer = connect(autocommit=False)
    writer.execute("set transaction isolation level repeatable read")
    writer.execute("select from revision.tracked")
    ledger.execute("alter table ledger rename id to old_id; alter table ledger rename n to id")
    writer.execute("insert into ledger (old_id, id) values (1, 777)")
    writer.commit()
    assert captured(ledger) == []
    assert one(ledger, "select message from revision.fault") == "the key column was dropped"


@EXPRESSIONS
def test_a_column_that_took_the_place_of_the_key_is_the_key(ledger, expression):
    """Users change a key to bigint in this way, because it needs no rewrite of the table."""
    track(ledger, expression)
    ledger.execute(
        "alter table ledger add new_id bigint not null default 0; alter table ledger drop constraint ledger_pkey; "
        "alter table ledger rename id to old_id; alter table ledger rename new_id to id; "
        "alter table ledger alter old_id drop not null; alter table ledger add primary key (id)"
    )
    ledger.execute("insert into ledger (id) values (5000000000)")
    refresh(ledger)
    ledger.execute("alter table ledger rename id to number")
    ledger.execute("insert into ledger (number) values (5000000001)")
    assert captured(ledger) == [5000000000, 5000000001]


@EXPRESSIONS
def test_a_restored_table_whose_columns_have_other_numbers_is_captured_by_its_key(
    db, bare_db, connect_to, cluster, expression
):
    connection = connect_to(db)
    connection.execute(
        "create table ledger (gone int, id bigint unique not null, n bigint unique not null, kind text)"
    )
    connection.execute("alter table ledger drop column gone")
    track(connection, expression, key="{id}")
    dumps.load(cluster, bare_db, dumps.dump(cluster, db))
    restored = connect_to(bare_db)
    restored.execute("insert into ledger values (3, 300, 'a')")
    refresh(restored)
    restored.execute("insert into ledger values (4, 400, 'a')")
    assert captured(restored) == [3, 4]


@pytest.mark.parametrize(
    ("ddl", "told"),
    [
        ("alter table ledger drop column id", "its key column id was dropped"),
        ("alter table ledger alter id type numeric", "its key column id is numeric now"),
        (NULLABLE, "its key column id can be null now"),
        ("alter table ledger drop constraint ledger_pkey", "its key column id is not unique any more"),
    ],
)
def test_a_key_that_is_none_any_more_is_told(ledger, ddl, told):
    track(ledger)
    ledger.execute(ddl)
    (finding,) = found(ledger)
    assert finding.startswith(f"public.ledger: {told}")


def test_a_key_that_was_renamed_is_told_and_followed(ledger):
    track(ledger)
    ledger.execute("alter table ledger rename id to number")
    assert found(ledger) == ["public.ledger: its key column was renamed or replaced"]
    refresh(ledger)
    assert found(ledger) == []


@pytest.fixture
def parted(connect):
    """A tracked table with the partition low, which was then detached."""
    connection = connect()
    connection.execute("create table item (id int primary key) partition by range (id)")
    connection.execute("create table low partition of item for values from (0) to (10)")
    track(connection, table="item")
    connection.execute("alter table item detach partition low")
    return connection


def test_rows_of_a_detached_partition_are_no_commits_of_its_former_table(parted):
    parted.execute("insert into low values (1)")
    assert captured(parted) == []


TAKEN_OFF = "public.low: it is no partition of public.item any more, so its capture was removed"


def test_a_detached_partition_is_told_and_loses_the_capture(parted):
    assert found(parted) == [
        "public.item: public.low was detached and still has its trigger, which does nothing there"
    ]
    assert refresh(parted) == [TAKEN_OFF]
    assert one(parted, "select count(*) from pg_trigger where tgname = 'pgchange_capture'") == 1
    assert found(parted) == []


def test_the_capture_of_a_detached_partition_is_taken_off_later_while_somebody_writes_there(parted, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into low values (1)")
    assert refresh(parted) == ["public.low: postponed, it is being written"]
    writer.commit()
    assert refresh(parted) == [TAKEN_OFF]


def test_untracking_does_not_wait_for_a_writer_of_a_detached_partition_for_ever(parted, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into low values (1)")
    shorten_locks(parted)
    parted.execute("set statement_timeout = '10s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="low is being written"):
        parted.execute("select revision.untrack('item')")


def test_rows_written_into_a_partition_while_it_was_detached_are_enqueued_later(parted):
    parted.execute("insert into low values (1), (2)")
    parted.execute("alter table item attach partition low for values from (0) to (10)")
    assert found(parted) == [
        "public.item: rows of public.low may have been there before it was captured, and are in no commit"
    ]
    parted.execute("select revision.enqueue_attached('low')")
    assert captured(parted) == [1, 2]


def test_a_detached_partition_that_is_tracked_itself_makes_commits_of_its_own_branch(parted):
    own = one(parted, "select revision.track('low')")
    parted.execute("insert into low values (1)")
    assert queued(parted) == [(1, own)]


def test_of_a_partition_that_came_with_rows_without_keys_those_are_faults(connect):
    connection = connect()
    connection.execute(
        "create table item (id int not null, day int not null, unique (id, day)) partition by range (day)"
    )
    track(connection, table="item", key="{id,day}")
    connection.execute("alter table item alter id drop not null; create table low (id int, day int not null)")
    connection.execute("insert into low values (1, 1), (null, 1)")
    connection.execute("alter table item attach partition low for values from (0) to (10)")
    refresh(connection)
    connection.execute("select revision.enqueue_attached('low')")
    assert connection.execute("select key from revision.commit_queue").fetchall() == [("{1,1}",)]
    assert one(connection, "select without_key from revision.tracking()") == 1
