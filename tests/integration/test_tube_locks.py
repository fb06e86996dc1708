"""What waits for whom while a tube is changed."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.tubes import attach, drain, make, one, pods, touched


@pytest.fixture
def item(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection)
    attach(connection)
    connection.execute("insert into item select generate_series(1, 9)")
    return connection


class Doing(threading.Thread):
    """Something that another session does meanwhile, and what it raised."""

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
        pid = self.connection.info.backend_pid
        while one(watcher, "select count(*) from pg_locks where pid = %s and not granted", pid) == 0:
            assert self.is_alive()


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


def test_who_attaches_and_changes_the_predicate_and_mends_at_once_do_not_hinder_each_other(item, connect):
    sessions = [
        Doing(connect(), *["select tube.tube_table_ensure_attached('q', 'item', 0)"] * 15) for _ in range(2)
    ]
    sessions.append(
        Doing(
            connect(), *[f"select tube.tube_ensure_exists('q', predicate => 'id > {n}')" for n in range(15)]
        )
    )
    sessions.append(Doing(connect(), *["select tube.refresh()"] * 15))
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


@pytest.mark.parametrize(("first", "second"), [("item", "child"), ("child", "item")])
def test_of_a_table_and_its_child_that_are_attached_at_once_the_second_is_refused(
    item, connect, first, second
):
    item.execute("create table child (primary key (id)) inherits (item)")
    make(item, "r")
    attaching = connect(autocommit=False)
    attach(attaching, first, "r", shard=1)
    other = Doing(connect(), f"select tube.tube_table_ensure_attached('r', '{second}', 2)")
    other.wait_until_it_waits(item)
    attaching.commit()
    other.join()
    assert [error.sqlstate for error in other.errors] == ["PC008"]
    assert f"rows in common with public.{first}" in str(other.errors[0])
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


@pytest.mark.parametrize(
    "call",
    [
        "select tube.tube_table_ensure_attached('q', 'item', 0)",
        "select tube.tube_table_ensure_detached('q', 'item')",
        "select tube.tube_ensure_exists('q', 2)",
        "select tube.tube_ensure_absent('q')",
        "select tube.tube_backfill_step3('1', 'q', 'item', 'id')",
        "select tube.backfill_begin('q', 'item', 'id')",
        "select tube.backfill_chunk(1)",
    ],
)
def test_a_role_whose_transactions_are_repeatable_read_is_told(item, connect, call):
    session = connect()
    session.execute("set default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error, match="read committed transaction only") as told:
        session.execute(call)
    assert told.value.sqlstate == "PC007"
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
