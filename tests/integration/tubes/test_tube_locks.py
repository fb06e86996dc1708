"""The locks for which changes of a tube wait, and the sessions that wait for these changes."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.limits import shorten_locks
from tests.tubes import attach, drain, make, one, pods, touched
from tests.waiting import until, waits


def make_item(connection):
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection)
    attach(connection)
    connection.execute("insert into item select generate_series(1, 9)")


@pytest.fixture
def prepared_item():
    return make_item


class Doing(threading.Thread):
    """A call that runs in another session in the block, and the error that the call raised."""

    def __init__(self, connection, *calls):
        super().__init__()
        self.connection, self.calls, self.errors = connection, calls, []
        self.start()

    def run(self):
        for call in self.calls:
            try:
                self.connection.execute(call)
            except psycopg.Error as error:
                self.errors.append(error)

    def wait_until_it_waits(self, watcher):
        until(watcher, waits(self.connection))


def test_a_write_goes_on_while_the_number_of_workers_waits_for_an_open_transaction(item, connect):
    reader = connect(autocommit=False)
    reader.execute("select from q")
    changing = Doing(connect(), "select tube.tube_ensure_exists('q', 2)")
    changing.wait_until_it_waits(item)
    writer = connect()
    writer.execute("set lock_timeout = '2s'")
    writer.execute("update item set n = 1 where id = 1")
    reader.rollback()
    changing.join()
    assert changing.errors == []
    assert one(item, "select partitions from tube.tube") == 2


def test_the_number_of_workers_does_not_wait_for_an_open_transaction_for_ever(item, connect):
    reader = connect(autocommit=False)
    reader.execute("select from q")
    shorten_locks(item)
    item.execute("set statement_timeout = '20s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="public.q is being used"):
        make(item, workers=2)
    assert one(item, "select partitions from tube.tube") == 1


def test_a_worker_that_collects_goes_on_while_its_table_waits_to_change_its_shard(item, connect):
    item.execute("truncate item")
    drain(item)
    worker = connect(autocommit=False)
    assert one(worker, "select tube.take_lock('q', 0)") is True
    moving = Doing(connect(), "select tube.tube_table_ensure_attached('q', 'item', 7)")
    moving.wait_until_it_waits(item)
    seq = one(worker, "select seq from q where ids = '{}'")
    worker.execute("set local lock_timeout = '5s'")
    assert one(worker, "select tube.collect('q', 1, 0, %s, '{5}')", seq) == 1
    worker.execute("select tube.control_done('q', 1, 0, %s)", [seq])
    worker.commit()
    moving.join()
    assert moving.errors == []
    assert pods(item) == [("T", 0, [5]), ("T", 7, [5])]


def test_a_touch_by_hand_goes_on_while_a_table_waits_to_change_its_shard(item, connect):
    worker = connect(autocommit=False)
    assert one(worker, "select tube.take_lock('q', 0)") is True
    moving = Doing(connect(), "select tube.tube_table_ensure_attached('q', 'item', 7)")
    moving.wait_until_it_waits(item)
    hand = connect()
    hand.execute("set lock_timeout = '5s'")
    hand.execute("select item_touch('{5}')")
    worker.rollback()
    moving.join()
    assert moving.errors == []


def test_attaching_changing_the_predicate_and_repairing_run_at_once(item, connect):
    sessions = [
        Doing(connect(), *["select tube.tube_table_ensure_attached('q', 'item', 0)"] * 15) for _ in range(2)
    ]
    sessions.append(
        Doing(
            connect(), *[f"select tube.tube_ensure_exists('q', predicate => 'id > {n}')" for n in range(15)]
        )
    )
    sessions.append(Doing(connect(), *["select tube.recapture()"] * 15))
    sessions.append(Doing(connect(), *[f"update item set n = {n} where id = 9" for n in range(60)]))
    for session in sessions:
        session.join()
    assert [error for session in sessions for error in session.errors] == []
    assert one(item, "select predicate from tube.attachment") == "id > 14"
    assert one(item, "select stale from tube.attachments()") is False


def test_a_detach_waits_for_a_chunk_of_a_backfill_before_it_locks_the_table(item, connect):
    filling = connect(autocommit=False)
    number = one(filling, "select tube.backfill_begin('q', 'item', 'id')")
    filling.commit()
    filling.execute("select id from tube.backfill where id = %s for update", [number])
    detaching = Doing(connect(), "select tube.tube_table_ensure_detached('q', 'item')")
    detaching.wait_until_it_waits(item)
    filling.execute("set local lock_timeout = '5s'")
    filling.execute("select from item")
    filling.commit()
    detaching.join()
    assert detaching.errors == []


def test_of_a_table_and_its_child_that_are_attached_at_once_the_second_is_refused(item, connect):
    item.execute("create table child (primary key (id)) inherits (item)")
    make(item, "r")
    attaching = connect(autocommit=False)
    attach(attaching, "item", "r", shard=1)
    other = Doing(connect(), "select tube.tube_table_ensure_attached('r', 'child', 2)")
    other.wait_until_it_waits(item)
    attaching.commit()
    other.join()
    assert [error.sqlstate for error in other.errors] == ["PC008"]
    assert "shares rows with public.item" in str(other.errors[0])
    item.execute("insert into child values (11)")
    assert pods(item, "r") == [("I", 1, [11])]


def test_a_table_that_is_attached_while_its_tube_is_removed_is_detached_too(item, connect):
    item.execute("create table other (id bigint primary key)")
    attaching = connect(autocommit=False)
    attach(attaching, "other")
    removing = Doing(connect(), "select tube.tube_ensure_absent('q')")
    removing.wait_until_it_waits(item)
    attaching.commit()
    removing.join()
    assert removing.errors == []
    assert one(item, "select count(*) from tube.tube") == 0
    assert one(item, "select count(*) from pg_trigger where tgrelid = 'other'::regclass") == 0


CALLS = [
    "select tube.tube_table_ensure_attached('q', 'item', 0)",
    "select tube.tube_table_ensure_detached('q', 'item')",
    "select tube.tube_ensure_exists('q', 2)",
    "select tube.tube_ensure_absent('q')",
    "select tube.tube_backfill_step3('1', 'q', 'item', 'id')",
    "select tube.backfill_begin('q', 'item', 'id')",
    "select tube.backfill_chunk(1)",
]


def test_a_role_whose_transactions_are_repeatable_read_is_told(item, connect):
    session = connect()
    session.execute("set default_transaction_isolation = 'repeatable read'")
    for call in CALLS:
        with pytest.raises(psycopg.Error, match="needs a read committed transaction") as told:
            session.execute(call)
            pytest.fail(f"{call} was done")
        assert told.value.sqlstate == "PC007", call
        assert "default_transaction_isolation" in told.value.diag.message_hint
    item.execute("insert into item values (10)")
    assert 10 in touched(item)


def test_writers_of_a_new_table_do_not_wait_for_the_workers_that_one_attached_with_it_waits_for(
    item, connect
):
    item.execute("create table fresh (id bigint primary key)")
    worker, both = connect(autocommit=False), connect(autocommit=False)
    assert one(worker, "select tube.take_lock('q', 0)") is True
    attach(both, "fresh", shard=7)
    with pytest.raises(psycopg.errors.LockNotAvailable, match="workers of tube q are at work") as told:
        attach(both, "item", shard=7)
    assert "before anything that locks a table" in told.value.diag.message_hint
    both.rollback()
    item.execute("insert into fresh values (1)")
    assert one(item, "select count(*) from tube.attachment") == 1


SLOW = (
    "autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0, "
    "autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1"
)


OTHERS = pytest.mark.release("each deed, and each kind of role, is one of the other two cases too")


@pytest.mark.parametrize(
    ("deed", "seen"),
    [
        ("attach", True),
        ("workers", False),
        pytest.param("attach", False, marks=OTHERS),
        pytest.param("workers", True, marks=OTHERS),
    ],
)
def test_an_autovacuum_makes_way(own_database, connect_to, deed, seen):
    connection = connect_to(own_database)
    connection.execute("alter system set autovacuum = on")
    connection.execute("alter system set autovacuum_naptime = '1s'")
    connection.execute("select pg_reload_conf()")
    connection.execute("create role plain; grant all on schema public to plain")
    connection.execute("select tube.grant_owner('plain')")
    if not seen:
        connection.execute("set role plain")
    connection.execute("create table item (id bigint primary key, name text)")
    make(connection)
    table = "item" if deed == "attach" else "q"
    connection.execute(f"alter table {table} set ({SLOW})")
    if deed == "attach":
        connection.execute("insert into item select g, repeat('x', 500) from generate_series(1, 5000) g")
        connection.execute("update item set name = name || 'y' where id % 3 = 0")
    else:
        connection.execute(
            "insert into q (op, shard, ids) select 'T', 0, array_fill(g, array[50]) from generate_series(1, 5000) g"
        )
        connection.execute("delete from q where seq % 2 = 0")
    working = f"relation = '{table}'::regclass and mode = 'ShareUpdateExclusiveLock'"
    until(connection, f"select exists (select from pg_locks where {working})", patience=60)
    if deed == "attach":
        attach(connection)
    else:
        make(connection, workers=2)


def test_a_session_that_holds_a_needed_lock_is_named(item, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into q (shard, ids) values (0, '{1}')")
    shorten_locks(item)
    with pytest.raises(psycopg.errors.LockNotAvailable) as told:
        make(item, workers=2)
    assert f"that do not end: process {writer.info.backend_pid}" in str(told.value)
