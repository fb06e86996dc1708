"""The backfill in chunks: it continues where it stopped, and its progress is visible."""

from __future__ import annotations

import random
import threading

import psycopg
import pytest

from tests.tubes import (
    ITEMS_IN_ORDER,
    attach,
    begin,
    chunk,
    controls,
    detach,
    drain,
    faults,
    ids_in_order,
    make,
    one,
    pods,
    run,
    steps,
    touched,
)


def test_a_backfill_goes_on_where_it_stopped(item, connect):
    number = begin(item)
    killed = connect(autocommit=False)
    for _ in range(4):
        chunk(item, number)
    chunk(killed, number)
    killed.close()
    assert begin(item) == number
    run(item, number)
    assert ids_in_order(item) == [row[0] for row in item.execute(ITEMS_IN_ORDER)]


def test_the_rate_of_one_that_is_resumed_is_the_old_one_until_two_chunks_tell_a_new_one(item):
    number = begin(item)
    for _ in range(2):
        chunk(item, number)
    item.execute("update tube.backfill set rate = 0.25")
    item.execute("select tube.backfill_pause(%s), tube.backfill_resume(%s)", [number, number])
    chunk(item, number)
    assert one(item, "select rate from tube.backfills()") == 0.3
    chunk(item, number)
    assert one(item, "select rate from tube.backfills()") > 1


def test_its_progress_is_for_others_to_read_while_it_runs(item, connect):
    number = begin(item)
    chunk(item, number)
    at_work = connect(autocommit=False)
    chunk(at_work, number)
    row = (
        connect()
        .execute(
            "select state, looked_at, total between 500 and 2000, percent > 0, touched, rate > 0, started_by "
            "from tube.backfills()"
        )
        .fetchone()
    )
    assert row == ("running", 100, True, True, 100, True, "postgres")
    at_work.commit()
    run(item, number)
    row = item.execute(
        "select state, looked_at, total, percent, finished_at is not null, remaining from tube.backfills()"
    )
    assert row.fetchone() == ("done", 1000, 1000, 100, True, None)


def test_a_paused_backfill_stays_where_it_is_until_it_is_resumed(item):
    number = begin(item)
    chunk(item, number)
    item.execute("select tube.backfill_pause(%s)", [number])
    assert chunk(item, number) == (0, 100, one(item, "select total from tube.backfill"), False, "paused")
    item.execute("select tube.backfill_resume(%s)", [number])
    assert chunk(item, number)[1] == 200
    run(item, number)
    assert touched(item) == list(range(1, 1001))


def test_a_backfill_that_is_paused_before_its_first_row_begins_once(item):
    item.execute("update item set day = null")
    drain(item)
    number = begin(item)
    assert chunk(item, number)[1] == 0
    item.execute("select tube.backfill_pause(%s); ", [number])
    item.execute("select tube.backfill_resume(%s)", [number])
    run(item, number)
    assert [payload["type"] for _, _, payload in controls(item)] == ["backfill_start", "backfill_end"]


def test_of_many_rows_with_one_id_each_is_judged_once(connect):
    connection = connect()
    connection.execute(
        "create table item (id bigint not null, n int); create index on item (id); "
        "insert into item select 7, g - 1 from generate_series(1, 50) as g"
    )
    make(connection, predicate="10 / n >= 0")
    attach(connection, group_by=["id"])
    run(connection, begin(connection, order_col="id"))
    assert faults(connection) == [(1, "division by zero")]
    assert set(touched(connection)) == {7}


def test_a_cancelled_backfill_ends_without_giving_anything_up(item):
    number = begin(item)
    chunk(item, number)
    item.execute("select tube.backfill_cancel(%s)", [number])
    assert chunk(item, number)[3:] == (False, "cancelled")
    assert [payload["type"] for _, _, payload in controls(item)] == ["backfill_start"]
    with pytest.raises(psycopg.Error, match="is cancelled"):
        item.execute("select tube.backfill_resume(%s)", [number])
    assert begin(item) != number


def test_one_backfill_of_a_table_at_a_time(item):
    number = begin(item)
    with pytest.raises(
        psycopg.Error, match=f"backfill {number} of public.item into tube q, by day, is not finished"
    ):
        begin(item, order_col="id")
    with pytest.raises(psycopg.Error, match="another backfill of public.item"):
        steps(item)
    run(item, number)
    with pytest.raises(psycopg.Error, match="has not been replayed to its end yet"):
        begin(item)


def test_the_first_chunk_waits_for_who_was_writing_when_it_began(item, connect):
    writer = connect(autocommit=False)
    writer.execute("update item set day = '1999-01-01' where id = 7")
    number = begin(item)
    with pytest.raises(psycopg.errors.LockNotAvailable, match="still being written"):
        item.execute("select * from tube.backfill_chunk(%s, '100 milliseconds')", [number])
    assert one(item, "select state from tube.backfill") == "scheduled"
    writer.commit()
    chunk(item, number)
    assert ids_in_order(item)[0] == 7


def test_rows_that_change_their_order_meanwhile_are_not_missed(item, connect):
    chance = random.Random(3)
    number = begin(item, chunk_size=50)
    writer = connect()
    finished = False
    while not finished:
        for _ in range(20):
            writer.execute(
                "update item set day = %s where id = %s",
                [chance.choice([None, f"20{chance.randrange(10, 40)}-01-01"]), chance.randrange(1, 1001)],
            )
        finished = chunk(item, number)[3]
    assert set(touched(item)) == set(range(1, 1001))


def test_a_backfill_of_a_table_that_is_detached_or_gets_another_shard_fails(item):
    number = begin(item)
    chunk(item, number)
    attach(item, shard=5)
    with pytest.raises(
        psycopg.Error, match="failed: public.item was attached under another shard|as shard 5, not 0"
    ):
        chunk(item, number)
    assert one(item, "select state from tube.backfills()") == "failed"
    number = begin(item)
    detach(item)
    with pytest.raises(psycopg.Error, match="not attached|detached"):
        chunk(item, number)


@pytest.mark.parametrize("owned", [True, False], ids=["by its owner", "by attaching anew"])
def test_a_backfill_whose_predicate_is_changed_fails(item, owned):
    """Otherwise the backfill would miss the rows that it has passed and for which the new predicate is true."""
    make(item, predicate="id > 500")
    number = begin(item)
    chunk(item, number)
    if owned:
        make(item, predicate="id > 0")
    else:
        item.execute("update tube.tube set predicate = 'id > 0'")
        attach(item)
    with pytest.raises(psycopg.Error, match=f"backfill {number} of public.item failed: .* predicate"):
        chunk(item, number)
    item.execute("delete from q")
    run(item, begin(item))
    assert touched(item) == list(range(1, 1001))


def test_a_backfill_whose_ids_are_others_fails_and_one_whose_column_is_renamed_goes_on(item):
    item.execute("alter table item add other bigint not null unique generated always as (1000 - id) stored")
    number = begin(item)
    chunk(item, number)
    item.execute("alter table item rename id to number")
    attach(item)
    chunk(item, number)
    attach(item, key=["number"])
    assert chunk(item, number)[4] == "running"
    attach(item, key=["other"])
    with pytest.raises(psycopg.Error, match="by other ids"):
        chunk(item, number)


def test_two_who_carry_out_the_same_backfill_share_it(item, connect):
    number = begin(item, chunk_size=20)

    def work():
        run(connect(), number)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids_in_order(item) == [row[0] for row in item.execute(ITEMS_IN_ORDER)]
    assert sorted(drain(item, limit=100)) == list(range(1, 1001))
    assert pods(item) == []


@pytest.mark.parametrize("way", ["chunk", "step 3"])
def test_a_table_does_not_change_its_shard_while_a_backfill_touches_it(item, connect, way):
    filling = connect(autocommit=False)
    if way == "chunk":
        chunk(filling, begin(item))
    else:
        step1 = one(item, "select tube.tube_backfill_step1()")
        filling.execute("select tube.tube_backfill_step3(%s, 'q', 'item', 'day')", [step1])
    item.execute("set lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        attach(item, shard=5)
    filling.commit()
    attach(item, shard=5)
    assert one(item, "select upto from tube.moved") > one(item, "select max(seq) from q where shard = 0")


def test_an_action_that_a_backfills_state_forbids_is_refused_with_the_possible_ones(item):
    number = begin(item)
    item.execute("select tube.backfill_cancel(%s)", [number])
    with pytest.raises(psycopg.Error, match=f"backfill {number} is cancelled") as told:
        item.execute("select tube.backfill_resume(%s)", [number])
    assert told.value.diag.message_hint == (
        "only a scheduled or running backfill can be paused, only a paused backfill resumed, "
        "only an unfinished backfill cancelled"
    )


def test_a_backfill_that_is_begun_too_early_is_told_what_to_wait_for(item):
    run(item, begin(item))
    with pytest.raises(psycopg.Error) as told:
        begin(item)
    assert told.value.diag.message_primary == (
        "the previous backfill of public.item into tube q has not been replayed to its end yet"
    )
    assert "select * from pgchange.status() shows what is left" in told.value.diag.message_hint


@pytest.mark.parametrize("order_col", [None, "", " "])
def test_without_a_column_it_goes_by_the_ids(connect, order_col):
    connection = connect()
    connection.execute("create table item (no bigint primary key)")
    connection.execute("insert into item select generate_series(1, 300)")
    make(connection)
    attach(connection, key=["no"])
    number = begin(connection, order_col=order_col)
    chunk(connection, number)
    assert begin(connection, order_col=order_col) == number
    run(connection, number)
    assert ids_in_order(connection) == list(range(1, 301))
    assert one(connection, "select order_col from tube.backfills()") == "no"


def test_a_running_one_is_found_without_its_column(item):
    assert begin(item, order_col="day") == begin(item, order_col=None)


def test_the_rate_counts_the_time_between_chunks_and_not_that_of_a_pause(item):
    number = begin(item)
    for _ in range(4):
        chunk(item, number)
    item.execute("update tube.backfill set rated_from = now() - interval '2 seconds'")
    chunk(item, number)
    rate, remaining = item.execute(
        "select rate, extract(epoch from remaining)::float8 from tube.backfills()"
    ).fetchone()
    assert 100 < rate <= 250
    assert rate == int(rate)
    assert remaining == int(remaining)
    assert 0 < remaining <= 20
    item.execute("select tube.backfill_pause(%s)", [number])
    # If the time of the pause counted, the time would be two minutes longer now, for 600 rows.
    item.execute("update tube.backfill set rated_from = rated_from - interval '2 minutes'")
    item.execute("select tube.backfill_resume(%s)", [number])
    chunk(item, number)
    assert one(item, "select rate from tube.backfills()") > 600 / 120


def test_a_rest_of_minutes_is_no_part_of_the_rate_and_a_slow_one_has_a_digit(item):
    number = begin(item)
    chunk(item, number)
    item.execute(
        "update tube.backfill set "
        "rated_from = rated_from - interval '1 hour', updated_at = updated_at - interval '1 hour'"
    )
    chunk(item, number)
    # If that hour counted, the rate would be less than one row in ten seconds.
    assert one(item, "select rate from tube.backfills()") > 1
    item.execute("update tube.backfill set rated_from = now() - interval '1 hour', rated_looked_at = 0")
    chunk(item, number)
    assert one(item, "select rate from tube.backfills()") == 0.08
