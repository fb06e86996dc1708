"""Scheduled backfills: the worker that is asked for a backfill carries it out, beside its other work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from airflow_pgchange import tubes
from airflow_pgchange.errors import ConsumerBusy, PgChangeError, Stopped
from airflow_pgchange.feeds import TubeFeed
from airflow_pgchange.tubes import control_pods, work_off
from tests.tubes import attach, begin, chunk, controls, drain, faults, lag, one, touched

FEED = TubeFeed("q")
SCHEDULE = "select tube.tube_backfill_schedule('q', 'day', 0, 9)"


def nothing(control):
    return None


def kinds(connection):
    return [payload["type"] for _, _, payload in controls(connection)]


def settle(connection, db):
    for _ in range(4):
        drain(connection)
        work_off(FEED, db, nothing)


def test_scheduling_leaves_out_a_table_whose_last_backfill_is_not_worked_off(item):
    """The last backfill is not processed, because its end pod still exists."""
    tubes.backfill(item, "q", "public.item", "day")
    assert one(item, SCHEDULE) == 0
    item.execute("delete from q")
    assert one(item, SCHEDULE) == 1


def test_a_schedule_behind_a_backfill_by_hand_is_done_by_it(db, item):
    item.execute(SCHEDULE)
    tubes.backfill(item, "q", "public.item", "day")
    settle(item, db)
    assert controls(item) == []
    assert faults(item) == []
    assert one(item, "select count(*) from tube.backfills()") == 1


def test_a_backfill_of_one_table_that_workers_are_asked_for_is_seen_at_once_and_carried_out_once(db, item):
    number = tubes.ask_backfill(item, "q", "public.item")
    assert tubes.ask_backfill(item, "q", "public.item") == number
    assert one(item, "select state from tube.backfills()") == "scheduled"
    assert kinds(item) == ["backfill_schedule"]
    settle(item, db)
    assert item.execute("select id, state from tube.backfills()").fetchall() == [(number, "done")]
    assert (controls(item), faults(item)) == ([], [])


def test_a_backfill_that_workers_are_asked_for_and_that_is_cancelled_is_not_begun_again(db, item):
    number = tubes.ask_backfill(item, "q", "public.item")
    item.execute("select tube.backfill_cancel(%s)", [number])
    settle(item, db)
    assert item.execute("select id, state from tube.backfills()").fetchall() == [(number, "cancelled")]
    assert controls(item) == []


def test_a_schedule_goes_on_with_the_backfill_that_somebody_began_in_another_order(db, item):
    item.execute(SCHEDULE)
    chunk(item, begin(item, order_col="kind"))
    work_off(FEED, db, nothing)
    assert touched(item) == list(range(1, 1001))
    assert one(item, "select order_col::text || state from tube.backfills()") == "kinddone"


def test_a_worker_that_is_busy_at_the_end_of_a_scheduled_backfill_does_not_keep_it_for_ever(
    db, item, connect
):
    item.execute(SCHEDULE)
    item.execute("select tube.register('q', 1, 0)")
    busy = connect(autocommit=False)
    busy.execute("select tube.take_lock('q', 0)")
    with pytest.raises(ConsumerBusy):
        work_off(FEED, db, nothing)
    busy.rollback()
    settle(item, db)
    assert controls(item) == []
    assert faults(item) == []
    assert one(item, "select count(*) from tube.backfills()") == 1


KILLED = """
import os, sys
from airflow_pgchange.tubes import work_off
from airflow_pgchange.feeds import TubeFeed
def told(progress):
    if progress.finished:
        os.kill(os.getpid(), 9)
work_off(TubeFeed("q"), sys.argv[1], lambda control: None, on_progress=told)
"""


def test_a_worker_that_is_killed_at_the_end_of_a_scheduled_backfill_does_not_keep_it_for_ever(db, item):
    item.execute(SCHEDULE)
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", KILLED, db], cwd=root, check=False).returncode == -9
    assert one(item, "select state from tube.backfills()") == "done"
    settle(item, db)
    assert controls(item) == []
    assert faults(item) == []
    assert one(item, "select count(*) from tube.backfills()") == 1


def test_a_paused_one_keeps_nobody_waiting_and_goes_on_when_it_is_resumed(db, item):
    item.execute(SCHEDULE)
    number = begin(item)
    item.execute("select tube.backfill_pause(%s)", [number])
    item.execute("truncate item; insert into item select generate_series(1, 3)")
    drain(item)
    assert [each.control.type for each in work_off(FEED, db, nothing)] == ["truncate"]
    assert kinds(item) == ["backfill_schedule"]
    shown = lag(item)
    assert (shown["ready"], shown["waiting"]) == (0, 1)
    item.execute("select tube.backfill_resume(%s)", [number])
    assert lag(item)["ready"] == 1
    settle(item, db)
    assert controls(item) == []


def test_a_backfill_paused_at_work_goes_on_when_it_is_resumed(db, item):
    item.execute(SCHEDULE)
    number = begin(item)
    seen = []

    def pause(progress):
        seen.append(progress.state)
        if len(seen) == 1:
            item.execute("select tube.backfill_pause(%s)", [number])

    done = work_off(FEED, db, nothing, on_progress=pause)
    assert [each.control.type for each in done] == ["backfill_start"]
    assert seen == ["running", "paused"]
    assert lag(item)["waiting"] == 1
    item.execute("select tube.backfill_resume(%s)", [number])
    settle(item, db)
    assert controls(item) == []


def test_it_takes_only_so_long_of_the_workers_time_and_goes_on_the_next_time(db, item):
    item.execute(SCHEDULE)
    begin(item)
    seen = []
    for _ in range(3):
        work_off(
            FEED,
            db,
            nothing,
            backfill_timeout=0,
            on_progress=lambda progress: seen.append(progress.looked_at),
        )
    assert seen == [100, 200, 300]
    assert kinds(item)[0] == "backfill_schedule"
    work_off(FEED, db, nothing)
    assert touched(item) == list(range(1, 1001))


def test_a_cancelled_one_is_not_begun_again(db, item):
    item.execute(SCHEDULE)
    number = begin(item)

    def cancel(progress):
        item.execute("select tube.backfill_cancel(%s)", [number])

    work_off(FEED, db, nothing, on_progress=cancel)
    settle(item, db)
    assert controls(item) == []
    assert one(item, "select count(*) from tube.backfills()") == 1
    assert "was cancelled" in faults(item)[0][1]


@pytest.mark.parametrize("paused", [True, False])
def test_a_backfill_cancelled_while_nobody_carries_it_out_is_not_begun_again(db, item, paused):
    item.execute(SCHEDULE)
    number = begin(item, chunk_size=100)
    work_off(FEED, db, nothing, backfill_timeout=0)
    assert one(item, "select state from tube.backfills()") == "running"
    if paused:
        item.execute("select tube.backfill_pause(%s)", [number])
    item.execute("select tube.backfill_cancel(%s)", [number])
    settle(item, db)
    assert controls(item) == []
    assert one(item, "select count(*) from tube.backfills()") == 1
    assert f"backfill {number} was cancelled" in faults(item)[0][1]


def test_a_backfill_scheduled_after_a_cancelled_one_is_carried_out(db, item):
    item.execute("select tube.backfill_cancel(%s)", [begin(item)])
    item.execute(SCHEDULE)
    settle(item, db)
    states = item.execute("select state from tube.backfills() order by id").fetchall()
    assert states == [("cancelled",), ("done",)]


def test_a_scheduled_backfill_that_another_process_has_done_is_no_failure(db, item, monkeypatch):
    item.execute(SCHEDULE)
    due, behind = control_pods._due, []

    def as_another_works_it_off(connection, feed):
        seen = due(connection, feed)
        if not behind:
            behind.append(feed)
            work_off(FEED, db, nothing)
        return seen

    monkeypatch.setattr(control_pods, "_due", as_another_works_it_off)
    assert work_off(FEED, db, nothing) == []
    assert behind == [FEED]
    assert one(item, "select max(control_attempt) from tube.worker") == 0
    assert one(item, "select count(*) from tube.backfills()") == 1


def test_a_backfill_that_waits_for_a_writer_delays_no_other_control_pod(db, item, connect, monkeypatch):
    item.execute("create table other (id bigint primary key)")
    attach(item, "other")
    item.execute(SCHEDULE.replace("'day'", "'id'"))
    item.execute("truncate other")
    writer = connect(autocommit=False)
    writer.execute("update item set kind = 'b' where id = 1")
    monkeypatch.setattr("airflow_pgchange.tubes.control_pods.LEAST_WAIT", 0.1)
    with pytest.raises(ConsumerBusy, match="still being written"):
        work_off(FEED, db, nothing, backfill_timeout=0)
    assert "truncate" not in kinds(item)
    writer.rollback()
    settle(item, db)
    assert controls(item) == []


def test_a_table_that_changed_its_shard_is_backfilled_under_the_new_one(db, item):
    item.execute(SCHEDULE)
    attach(item, shard=5)
    settle(item, db)
    assert kinds(item) == []
    assert one(item, "select shard from tube.backfills()") == 5


def test_without_an_order_it_goes_by_the_ids_whatever_their_column_is_called(db, item):
    item.execute("create table named (no bigint primary key); insert into named values (4), (5)")
    attach(item, "named", key=["no"])
    item.execute(
        """select tube.touch('q', 0, '{}', 'B', '{"type": "backfill_schedule", "tbl": "public.named"}')"""
    )
    work_off(FEED, db, nothing)
    assert touched(item) == [4, 5]


def test_when_the_time_is_over_no_further_backfill_is_begun(db, item):
    for number in range(1, 5):
        item.execute(f"create table item{number} (like item including all)")
        item.execute(f"insert into item{number} select * from item")
        attach(item, f"item{number}", shard=number)
    item.execute("select tube.tube_backfill_schedule('q', 'id', 0, 4)")
    work_off(FEED, db, nothing, backfill_timeout=0)
    assert one(item, "select count(*) from tube.backfill") == 1
    for _ in range(20):
        work_off(FEED, db, nothing, backfill_timeout=0)
        drain(item)
    assert one(item, "select count(*) from tube.backfill where state = 'done'") == 5


def test_a_backfill_that_waits_for_a_writer_leaves_other_backfills_their_time(db, item, connect):
    item.execute("create table other (like item including all)")
    attach(item, "other", shard=1)
    item.execute("select tube.tube_backfill_schedule('q', 'id', 0, 1)")
    writer = connect(autocommit=False)
    writer.execute("lock table item in row exclusive mode")
    with pytest.raises(PgChangeError, match="still being written"):
        work_off(FEED, db, nothing, backfill_timeout=0)
    assert one(item, "select state from tube.backfill where tbl = 'other'::regclass") == "done"


def test_a_scheduled_backfill_that_is_stopped_has_not_failed(db, item):
    item.execute(SCHEDULE)
    with pytest.raises(Stopped):
        work_off(FEED, db, nothing, stopped=lambda: True)
    assert one(item, "select count(*) from tube.worker where control_failed_at is not null") == 0
