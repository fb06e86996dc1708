"""Watchers in a triggerer whose supervisor is slow because of the metadata database, or whose event loop is blocked."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from airflow.jobs.triggerer_job_runner import TriggerCommsDecoder
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import ConnectionResult, _RequestFrame, _ResponseFrame
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.errors import AirflowUnavailable, InvalidArgument, ServerUnavailable
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.queries import ask_all, select
from airflow_pgchange.triggers import connection_lookup, poller
from airflow_pgchange.triggers.connection_lookup import Lookups
from airflow_pgchange.triggers.feed import FeedTrigger
from airflow_pgchange.triggers.loop_time import SLICES, within
from airflow_pgchange.triggers.poller import Switchboard
from airflow_pgchange.triggers.subscription import Failure, Recovered, Subscription
from airflow_pgchange.triggers.watch_queries import BacklogWatch
from tests.ledger import Connect, make_ledger, writer
from tests.watching import FEED, first

SHOP = "shop"


class Supervisor:
    """Answers a triggerer's messages one by one, as Airflow's supervisor does.

    A pause before each answer stands for the time that the metadata database takes.
    """

    def __init__(self, db: str) -> None:
        self.pause = 0.0
        self.locked = 0
        """The number of next lookups that fail, as if the metadata database were locked."""
        self.messages: Counter[str] = Counter()
        server = conninfo_to_dict(db)
        connection = ConnectionResult(
            conn_id=SHOP,
            conn_type="postgres",
            host=server["host"],
            login=server["user"],
            password="secret",
            schema=server["dbname"],
            port=int(str(server["port"])),
            extra='{"connect_timeout": 20}',
        )
        self._connection = connection.model_dump(by_alias=True)
        self.ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._theirs.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._theirs.close()

    def _serve(self) -> None:
        with self._theirs.makefile("rb") as messages:
            while len(length := messages.read(4)) == 4:
                request = msgspec.msgpack.decode(
                    messages.read(int.from_bytes(length, "big")), type=_RequestFrame
                )
                kind = str((request.body or {})["type"])
                self.messages[kind] += 1
                time.sleep(self.pause)
                self._theirs.sendall(self._answer(request.id, kind).as_bytes())

    def _answer(self, number: int, kind: str) -> _ResponseFrame:
        if kind != "GetConnection":
            return _ResponseFrame(number)
        if self.locked:
            self.locked -= 1
            error = {"type": "ErrorResponse", "error": "API_SERVER_ERROR", "detail": {"message": "locked"}}
            return _ResponseFrame(number, error=error)
        return _ResponseFrame(number, self._connection)


@pytest.fixture
async def supervisor(db: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervisor]:
    """Connect this process to a supervisor, as a triggerer is connected."""
    supervisor = Supervisor(db)
    reader, writer_ = await asyncio.open_connection(sock=supervisor.ours)
    comms = TriggerCommsDecoder(socket=supervisor.ours, async_writer=writer_, async_reader=reader)
    # In Airflow 3.1 the task that sends a request reads the answer itself.
    reading = hasattr(comms, "start_reader")
    if reading:
        await comms.start_reader()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", comms, raising=False)
    yield supervisor
    if reading:
        assert comms._reader_task is not None
        comms._reader_task.cancel()
    writer_.close()
    await asyncio.to_thread(supervisor.close)


@pytest.fixture
def write(db: str, connect: Connect) -> Callable[[int], None]:
    make_ledger(connect())
    return writer(connect())


async def next_news(subscription: Subscription) -> Any:
    async with asyncio.timeout(20):
        return await anext(aiter(subscription))


@asynccontextmanager
async def longest_block() -> AsyncIterator[list[float]]:
    """Yield a list with one number: at the end of the block, the longest time for which the event loop was blocked."""
    longest = [0.0]

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest[0] = max(longest[0], time.monotonic() - began)

    task = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        task.cancel()


async def test_a_slow_supervisor_is_blamed_and_not_the_server(
    supervisor: Supervisor, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds: the lookup takes longer than a look may."""
    monkeypatch.setattr(connection_lookup, "LOOKED_UP_WITHIN", 0.5)
    monkeypatch.setattr(poller, "ANSWER_WITHIN", 2.0)
    supervisor.pause = 0.75
    write(1)
    async with (
        longest_block() as longest,
        Switchboard().subscribe(BacklogWatch(FEED), SHOP, SHOP, 0.05) as subscription,
    ):
        troubles = []
        while isinstance(news := await next_news(subscription), Failure):
            troubles.append(news.error)
        assert isinstance(news, Recovered)
        assert (await next_news(subscription))["ready"] == 1
    assert troubles
    assert all(isinstance(error, AirflowUnavailable) for error in troubles)
    assert "shop: Airflow did not return this connection within 0.5 s. PostgreSQL was not asked" in str(
        troubles[0]
    )
    # The first lookup continued, and there was no second.
    assert supervisor.messages["GetConnection"] == 1
    assert longest[0] < supervisor.pause


async def test_many_watchers_of_one_connection_look_it_up_once(
    supervisor: Supervisor, write: Callable[[int], None]
) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    supervisor.pause = 0.2
    write(1)
    triggers = [FeedTrigger(FEED, SHOP, once=True) for _ in range(5)]
    payloads = await asyncio.gather(*map(first, triggers))
    assert [payload["ready"] for payload in payloads] == [1] * 5
    assert supervisor.messages["GetConnection"] == 1


async def test_a_locked_metadata_database_fails_no_sensor(
    supervisor: Supervisor, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's SDK reports such a failure as a connection that is not defined."""
    monkeypatch.setattr(connection_lookup, "ASK_AGAIN_AFTER", (0.05, 0.05))
    supervisor.locked = 2
    write(1)
    assert (await first(FeedTrigger(FEED, SHOP, once=True)))["ready"] == 1
    supervisor.locked = 3
    payload = await first(FeedTrigger(FEED, SHOP, once=True))
    assert payload["permanent"]
    assert "`shop` isn't defined" in payload["error"]


async def test_a_lookup_that_fails_after_all_have_left_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    failing = asyncio.Event()

    async def ask(conn_id: str) -> str:
        await failing.wait()
        raise InvalidArgument("no such connection")

    found = Lookups(ask)
    waiting = asyncio.create_task(found.conninfo(SHOP))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    failing.set()
    await asyncio.sleep(0.01)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        found.forget(SHOP)
        del found, waiting
        await asyncio.sleep(0.01)
    assert not caplog.records


async def test_the_result_of_a_lookup_is_given_to_the_next_who_asks_and_then_looked_up_anew() -> None:
    asked: list[str] = []
    ready = asyncio.Event()

    async def ask(conn_id: str) -> str:
        asked.append(conn_id)
        await ready.wait()
        return f"password={len(asked)}"

    found = Lookups(ask)
    impatient = asyncio.create_task(found.conninfo(SHOP))
    await asyncio.sleep(0.01)
    impatient.cancel()
    ready.set()
    assert await found.conninfo(SHOP) == "password=1"
    assert await found.conninfo(SHOP) == "password=2"


async def test_a_server_that_accepts_nothing_is_blamed_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_lookup, "CONNECTED_WITHIN", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conninfo = make_conninfo("", host="127.0.0.1", port=silent.getsockname()[1], user="x", dbname="x")

        async def ask(conn_id: str) -> str:
            return conninfo

        with pytest.raises(ServerUnavailable, match=r"shop: PostgreSQL accepted no connection within 0\.5 s"):
            await Lookups(ask).open(SHOP, False)


async def test_a_blocked_event_loop_does_not_make_an_answer_late(
    db: str, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block the event loop during a query, for longer than the answer may take."""
    monkeypatch.setattr(poller, "ANSWER_WITHIN", 1.0)
    monkeypatch.setattr(poller, "PATIENCE", replace(poller.PATIENCE, timeout=60.0))
    write(1)

    class Blocking(BacklogWatch):
        def shared(self, position: Any) -> None:
            asyncio.get_running_loop().call_soon(time.sleep, 2.5)

    async def opener(conn_id: str, primary: bool) -> Any:
        return await connect_async(db, primary=primary)

    async with Switchboard(opener).subscribe(Blocking(FEED), SHOP, SHOP, 600) as subscription:
        assert (await next_news(subscription))["ready"] == 1


async def test_a_connection_whose_answer_is_unread_is_not_cut(db: str) -> None:
    """A server may be silent for two thirds of ``tcp_user_timeout`` if the event loop has not read its answer."""
    async with await connect_async(make_conninfo(db, tcp_user_timeout=1500)) as connection:
        answer = asyncio.create_task(connection.execute("select pg_sleep(0.2), 42"))
        await asyncio.sleep(0.1)
        time.sleep(3)
        assert (await (await answer).fetchone())[1] == 42
        assert await ask_all(connection, [select("pg_catalog.abs", 42)]) == [42]


async def test_time_in_which_the_loop_ran_is_what_counts() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with within(0.6):
            time.sleep(0.5)
            await asyncio.sleep(20)
    assert 0.5 + 0.6 * (1 - 3 / SLICES) < time.monotonic() - began < 10
    async with within(0.05):
        time.sleep(0.2)
    await asyncio.sleep(0.1)
