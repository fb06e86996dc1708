"""Triggers of deferred sensors on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, end_position
from airflow_pgchange.triggers import poller
from airflow_pgchange.triggers.feed import FeedTrigger, PointTrigger
from tests.airflow_home import uri
from tests.ledger import Connect, make_ledger, writer
from tests.waiting import until
from tests.watching import FEED, first, process, uri_by_name


@pytest.fixture
def conn_id(db: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Airflow connection to ``db`` with an application name, by which the test finds its sessions on the server."""
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri_by_name(db))
    return "airline"


@pytest.fixture
def db_with_ledger(db: str, connect: Connect) -> str:
    make_ledger(connect())
    return db


@pytest.fixture
def write(db_with_ledger: str, connect: Connect) -> Callable[[int], None]:
    """Insert this number of rows in one transaction."""
    return writer(connect())


async def test_a_trigger_fires_for_a_backlog_that_was_there_before_it(
    conn_id: str, write: Callable[[int], None]
) -> None:
    write(3)
    payload = await first(FeedTrigger(FEED, conn_id))
    assert (payload["feed"], payload["ready"]) == ("commits:delays/0", 3)


async def test_a_trigger_fires_for_a_change_that_comes_later(
    conn_id: str, write: Callable[[int], None]
) -> None:
    event = asyncio.create_task(first(FeedTrigger(FEED, conn_id)))
    done, _ = await asyncio.wait({event}, timeout=1)
    assert not done
    await asyncio.to_thread(write, 1)
    assert (await event)["ready"] == 1


async def test_a_trigger_fires_through_a_pooler(
    pgbouncer: str, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_POOLED", uri(pgbouncer))
    write(3)
    assert (await first(FeedTrigger(FEED, "pooled")))["ready"] == 3


async def test_a_trigger_waits_for_min_changes(conn_id: str, write: Callable[[int], None]) -> None:
    write(9)
    event = asyncio.create_task(first(FeedTrigger(FEED, conn_id, min_changes=10)))
    done, _ = await asyncio.wait({event}, timeout=1)
    assert not done
    await asyncio.to_thread(write, 1)
    assert (await event)["ready"] == 10


async def test_a_trigger_fires_for_few_changes_that_have_waited_long_enough(
    conn_id: str, write: Callable[[int], None]
) -> None:
    write(1)
    payload = await first(FeedTrigger(FEED, conn_id, min_changes=1000, max_age=0.5))
    assert payload["ready_age"] >= 0.5


async def test_a_trigger_is_silent_while_a_consumer_is_at_work(
    conn_id: str, db: str, write: Callable[[int], None]
) -> None:
    write(3)
    with ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(10)
        event = asyncio.create_task(first(FeedTrigger(FEED, conn_id)))
        done, _ = await asyncio.wait({event}, timeout=1.5)
        transaction.ack()
    event.cancel()
    assert not done


async def test_a_deferred_sensor_on_a_branch_that_does_not_exist_is_told_so(conn_id: str) -> None:
    payload = await first(FeedTrigger(CommitFeed("delays", 999), conn_id, once=True))
    assert "999" in payload["error"]


async def test_a_deferred_sensor_on_a_connection_that_does_not_exist_is_told_so() -> None:
    payload = await first(FeedTrigger(FEED, "nowhere", once=True))
    assert "nowhere" in payload["error"]


async def test_a_deferred_sensor_on_a_database_without_our_schemas_is_told_what_to_run(
    bare_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_BARE", uri(bare_db))
    payload = await first(FeedTrigger(FEED, "bare", once=True))
    assert "airflow-pgchange install" in payload["error"]


async def test_a_deferred_sensor_waits_for_who_has_locked_what_it_reads(
    conn_id: str, db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    lock = connect()
    lock.execute("begin; lock table revision.branch in access exclusive mode")
    event = asyncio.create_task(first(FeedTrigger(FEED, conn_id, once=True)))
    watcher = connect()
    seen = "select exists (select from pgchange.watchers() as w where w.error is not null)"
    await asyncio.to_thread(until, watcher, seen)
    lock.execute("rollback")
    write(1)
    assert (await event)["ready"] == 1


async def test_progress_may_lie_in_another_database_than_the_changes(
    conn_id: str,
    db: str,
    other_db: str,
    write: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", uri(other_db))
    write(3)
    with ConsumerTransaction(FEED, other_db, db) as transaction:
        transaction.claim(2)
        transaction.ack()
    assert (await first(FeedTrigger(FEED, "warehouse", conn_id)))["ready"] == 1
    assert (await first(FeedTrigger(FEED, conn_id)))["ready"] == 3


async def test_a_point_is_passed_when_the_consumer_has_processed_what_was_there(
    conn_id: str, db: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(3)
    goal = end_position.point(connect(), FEED)
    event = asyncio.create_task(first(PointTrigger(FEED, conn_id, None, goal)))
    done, _ = await asyncio.wait({event}, timeout=0.5)
    assert not done
    write(3)
    assert await asyncio.to_thread(process, db, 3) == 3
    assert (await event)["passed"]


async def test_an_error_that_nobody_foresaw_ends_the_trigger_instead_of_silencing_it(
    conn_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> list[Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(poller, "ask_all", broken)
    with pytest.raises(ZeroDivisionError):
        await first(FeedTrigger(FEED, conn_id))
