"""The sessions for which a backfill in steps waits, and backfills that run at the same time."""

from __future__ import annotations

import threading

import psycopg
import pytest

from tests.tubes import (
    attach,
    begin,
    chunk,
    make,
    make_items,
    one,
    pods,
    run,
    steps,
    touched,
)
from tests.waiting import sleeps, until, waits


def test_step_2_waits_for_writers_and_names_them(item, connect):
    writer = connect(autocommit=False)
    writer.execute("update item set kind = 'b' where id = 1")
    with pytest.raises(psycopg.errors.LockNotAvailable, match=f"process {writer.info.backend_pid}"):
        item.execute("select tube.tube_backfill_step2('100 milliseconds')")
    writer.rollback()
    item.execute("select tube.tube_backfill_step2('100 milliseconds')")


def test_step_2_waits_for_a_prepared_transaction_and_names_it(item):
    item.execute("begin")
    item.execute("update item set kind = 'b' where id = 1")
    item.execute("prepare transaction 'tube-step2'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="prepared transaction 'tube-step2'"):
        item.execute("select tube.tube_backfill_step2('100 milliseconds')")
    item.execute("rollback prepared 'tube-step2'")
    item.execute("select tube.tube_backfill_step2('100 milliseconds')")


def test_step_2_goes_on_waiting_for_a_transaction_that_is_prepared_meanwhile(item, connect):
    writer = connect()
    writer.execute("begin")
    writer.execute("update item set kind = 'b' where id = 1")
    ended = []

    def wait():
        connection = connect()
        connection.execute("select tube.tube_backfill_step2('30 seconds')")
        ended.append(one(connection, "select kind from item where id = 1"))

    thread = threading.Thread(target=wait)
    thread.start()
    until(item, sleeps("^select tube.tube_backfill_step2"))
    writer.execute("prepare transaction 'tube-meanwhile'")
    item.execute("select pg_sleep(0.2)")
    assert ended == []
    item.execute("commit prepared 'tube-meanwhile'")
    thread.join()
    assert ended == ["b"]


def test_step_2_does_not_wait_for_readers_nor_for_who_came_later(item, connect):
    reader = connect(autocommit=False)
    reader.execute("select count(*) from item, q")
    other = connect(autocommit=False)
    other.execute("create table unrelated (id int)")
    other.execute("insert into unrelated values (1)")
    item.execute("select tube.tube_backfill_step2('100 milliseconds')")


def test_an_ordinary_role_waits_too(item, connect, role):
    keeper = role("keeper")
    item.execute("select tube.grant_consumer(%s::regrole)", [keeper.name])
    item.execute(f"grant insert, select on q to {keeper.name}")
    writer = connect(autocommit=False)
    writer.execute("update item set kind = 'b' where id = 1")
    with (
        psycopg.connect(keeper.conninfo, autocommit=True) as connection,
        pytest.raises(psycopg.errors.LockNotAvailable),
    ):
        connection.execute("select tube.tube_backfill_step2('100 milliseconds')")


def test_step_3_is_skipped_while_the_end_of_the_last_one_is_there(item):
    steps(item)
    notices = []
    item.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    before = len(pods(item))
    steps(item)
    assert len(pods(item)) == before
    assert "skipped" in notices[0]
    item.execute("delete from q where payload ->> 'type' = 'backfill_end'")
    steps(item)
    assert len(pods(item)) > before


def test_the_end_pod_of_one_table_does_not_keep_another_of_the_shard_back(item):
    item.execute("create table other (id bigint primary key, day date)")
    item.execute("insert into other values (5000, null)")
    attach(item, "other")
    steps(item)
    steps(item, "other")
    assert 5000 in touched(item)


def test_of_two_at_once_the_second_waits_and_is_skipped(item, connect):
    first = connect(autocommit=False)
    step1 = one(item, "select tube.tube_backfill_step1()")
    first.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day')", [step1])
    notices = []

    def second():
        connection = connect()
        connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        connection.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day')", [step1])

    thread = threading.Thread(target=second)
    thread.start()
    until(item, waits(kind="advisory"))
    first.commit()
    thread.join()
    assert "skipped" in notices[0]
    assert touched(item) == list(range(1, 1001))


def test_backfills_of_other_tables_go_on_side_by_side(item, connect):
    item.execute("create table other (id bigint primary key, day date)")
    item.execute("insert into other values (5000, null)")
    attach(item, "other")
    long = connect(autocommit=False)
    step1 = one(item, "select tube.tube_backfill_step1()")
    long.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day')", [step1])
    number = begin(item, "other")
    run(item, number)
    item.execute("select tube.tube_backfill_step2('1 second')")
    long.commit()
    assert len(touched(item)) == 1001


def test_a_backfill_that_waited_while_the_shard_changed_goes_under_the_new_one(item, connect):
    mover = connect(autocommit=False)
    attach(mover, shard=5)
    thread = threading.Thread(target=lambda: steps(connect()))
    thread.start()
    until(item, waits(kind="advisory"))
    mover.commit()
    thread.join()
    assert {shard for _, shard, _ in pods(item)} == {5}


def test_step_3_fails_where_the_predicate_changes_meanwhile(item, connect):
    changing = connect(autocommit=False)
    changing.execute("lock table item in access exclusive mode")
    told = []

    def fill():
        try:
            steps(connect())
        except psycopg.Error as error:
            told.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    until(item, waits(relation="item"))
    make(changing, predicate="id > 500")
    changing.commit()
    thread.join()
    assert "changed meanwhile" in str(told[0])
    assert pods(item) == []


def test_a_truncation_does_not_wait_for_a_backfill_that_waits_for_another_that_waits_for_it(item, connect):
    make(item, tube="r")
    attach(item, tube="r")
    writer = connect()
    writer.execute("begin; set local lock_timeout = '30s'")
    writer.execute("update item set kind = 'b' where id = 1")
    number = begin(item)
    waiting = [
        threading.Thread(target=lambda: chunk(connect(), number)),
        threading.Thread(target=lambda: begin(connect(), tube="r")),
    ]
    for thread, comes in zip(waiting, [sleeps("backfill_chunk"), waits(kind="advisory")], strict=True):
        thread.start()
        until(item, comes)
    writer.execute("truncate item")
    writer.execute("commit")
    for thread in waiting:
        thread.join()
    assert one(item, "select count(*) from tube.backfills()") == 2


def test_a_statement_timeout_says_for_whom_it_waited(connect):
    connection, writer = connect(), connect(autocommit=False)
    make_items(connection)
    writer.execute("update item set kind = 'b' where id = 1")
    connection.execute("set statement_timeout = '1s'")
    with pytest.raises(
        psycopg.errors.QueryCanceled, match=f"statement timeout.*by process {writer.info.backend_pid}"
    ):
        connection.execute("select tube.tube_backfill_step2()")


def test_step_3_refuses_a_table_of_which_a_backfill_is_not_finished(item):
    step1 = one(item, "select tube.tube_backfill_step1()")
    number = begin(item)
    chunk(item, number)
    with pytest.raises(psycopg.Error, match="another backfill of public.item into tube q is not finished"):
        item.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day')", [step1])
