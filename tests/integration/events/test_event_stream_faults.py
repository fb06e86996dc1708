"""Server-sent events under faults: limits, slow clients, lost connections, the shutdown of the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.events import publish, stream_log, subscribe, topical, unsubscribe
from airflow_pgchange.events import streams as streams_module
from airflow_pgchange.events.http import event_router
from airflow_pgchange.events.stream import StreamPosition
from airflow_pgchange.events.stream_log import StreamLog
from airflow_pgchange.events.streams import EventStreams
from demo.postgres import free_port
from tests.handling import numbered
from tests.streaming import may_read, numbers, serving
from tests.web import SECONDS, listening, served

ROOT = Path(__file__).parents[3]


@pytest.fixture
def serve(db):
    """Serve streams of ``db``. Yield them and their address."""
    with serving(db) as start:
        yield start


def test_an_id_of_the_future_that_was_made_up_is_told_of_the_gap(serve, connect):
    _, address = serve()
    with listening(f"{address}/t", "pmfffffffffffff000000000..fffffffffffff") as client:
        [gap] = client.events(1)
        publish(connect(), numbered(0, 2))
        assert (gap.type, numbers(client.events(2))) == ("gap", [0, 1])
    assert "does not belong to this stream" in gap.data


async def test_a_large_backlog_of_a_client_is_read_about_once(db, connect, monkeypatch):
    connection = connect()
    streams = EventStreams(db, "web", poll_interval=0.01, buffer=10_000)
    asked, shown = [], StreamLog._shown

    async def counted(log, ids):
        asked.extend(ids)
        return await shown(log, ids)

    async with streams.running():
        async with streams.stream(topical("t")) as texts:
            position = StreamPosition.parse((await anext(texts)).decode().split("id: ")[1].strip())
            publish(connection, numbered(0, 60, ballast="x" * 6_000))
            while "data: " not in (await anext(texts)).decode():
                pass
        monkeypatch.setattr(StreamLog, "_shown", counted)
        seen = 0
        async with streams.stream(topical("t"), position) as texts:
            async for text in texts:
                seen += text.count(b"data: ")
                if seen == 60:
                    break
    assert len(asked) < 200


async def test_the_signs_of_life_of_many_selections_are_one_call(db, connect):
    connection = connect()
    connection.execute(f"alter database {connection.info.dbname} set track_functions = 'pl'")
    ids = [subscribe(connection, "web", topical(f"user.{n}", expiry=timedelta(hours=1))) for n in range(50)]
    log = StreamLog(db, "web")
    await log.connect()
    assert await log.keep(ids, await log.end(), timedelta(minutes=5)) == set(ids)
    await log.disconnect()
    # The number of calls is reported some time after the session's end.
    calls = "select calls from pg_stat_user_functions where funcname = 'keep_alive' and calls > 0"
    while (counted := connection.execute(calls).fetchone()) is None:
        await asyncio.sleep(0.01)
    assert counted == (1,)


def test_streams_that_were_never_started_say_why_in_the_log(db, caplog):
    streams, outer, inner = EventStreams(db, "web"), FastAPI(), FastAPI()
    inner.include_router(event_router(streams, may_read))
    outer.mount("/inner", inner)
    with served(outer) as address:
        assert httpx.get(f"{address}/inner/t").status_code == 503
    assert "include their router in the application that the server starts" in caplog.text


def test_a_client_beyond_the_limit_is_refused_until_another_has_left(serve, connect):
    streams, address = serve(max_clients=1, keep_alive=0.05)
    with listening(f"{address}/t"):
        answer = httpx.get(f"{address}/t")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "1 clients are connected" in answer.text
        assert streams.clients == 1
    for _ in range(1000):
        if streams.clients == 0:
            break
        httpx.get(f"{address}/secret")
    with listening(f"{address}/t") as client:
        publish(connect(), numbered(0, 1))
        assert numbers(client.events(1)) == [0]


def test_a_slow_client_is_dropped_with_a_reason_and_loses_nothing(serve, connect):
    """Takes seconds: the buffers of the connection have to fill before a client is slow."""
    _, address = serve(buffer=2**18, send_timeout=10.0 * SECONDS)
    connection, ballast = connect(), "x" * 2**17
    with listening(f"{address}/t") as slow, listening(f"{address}/t") as quick:
        for n in range(150):
            publish(connection, numbered(n, n + 1, ballast=ballast))
            assert numbers(quick.events(1)) == [n]
        *seen, last = slow.events()
        assert (last.type, last.id) == ("dropped", "")
        assert "connect again" in json.loads(last.data)["reason"]
        assert len(seen) < 150
    with listening(f"{address}/t", slow.last_id) as client:
        seen += client.events(150 - len(seen))
    assert numbers(seen) == list(range(150))


async def test_a_client_too_slow_for_the_retention_is_told_of_the_gap(db, connect):
    connection, streams = connect(), EventStreams(db, "web", poll_interval=0.01)
    async with streams.running():
        async with streams.stream(topical("t")) as texts:
            last = StreamPosition.parse((await anext(texts)).decode().removeprefix("id: ").strip())
            publish(connection, numbered(0, 150))
            for _ in range(150):
                await anext(texts)
        async with streams.stream(topical("t"), last) as texts:
            seen = [await anext(texts) for _ in range(51)]
            connection.execute(
                "select pgmb.set_group_cursor('web', pgmb.create_event_id(clock_timestamp(), 0))"
            )
            connection.execute("delete from pgmb.events")
            publish(connection, numbered(150, 151))
            while b'"n": 150' not in seen[-1]:
                seen.append(await anext(texts))
    _, *replayed, gap, _ = seen
    found = [json.loads(text.partition(b"data: ")[2])["payload"]["n"] for text in replayed]
    assert found == [*range(len(found))]
    assert 50 <= len(found) < 150
    assert gap.startswith(b"event: gap\nid: pm")
    assert b"let go of before you had read it" in gap


def test_a_client_that_takes_nothing_is_left(serve, connect, caplog):
    streams, address = serve(buffer=2**18, send_timeout=0.2)
    connection = connect()
    with listening(f"{address}/t"), listening(f"{address}/t") as quick:
        n = 0
        while streams.clients == 2:
            publish(connection, numbered(n, n + 1, ballast="x" * 2**17))
            quick.events(1)
            n += 1
    assert "took nothing for 0.2 s" in caplog.text


def test_a_lost_connection_loses_no_event(serve, connect):
    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
        ended = connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
            "and pid <> pg_backend_pid() and backend_type = 'client backend'"
        ).fetchall()
        assert ended == [(True,)]
        publish(connection, numbered(1, 5))
        assert numbers(client.events(4)) == [1, 2, 3, 4]


def test_a_client_that_goes_before_it_is_answered_leaves_the_others_their_connection(
    serve, connect, monkeypatch
):
    slowly = f"with z as materialized (select pg_sleep(0.2)) select m.* from z, ({stream_log.MISSED}) as m"
    monkeypatch.setattr(stream_log, "MISSED", slowly)
    streams, address = serve()
    connection = connect()
    ours = (
        "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() "
        "and backend_type = 'client backend'"
    )
    [before] = connection.execute(ours).fetchall()
    with listening(f"{address}/t"):
        pass
    while streams.clients:
        httpx.get(f"{address}/secret")
    assert connection.execute(ours).fetchall() == [before]
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
    assert connection.execute(ours).fetchall() == [before]


def test_a_database_that_does_not_answer_is_away_and_comes_back(serve, connect, monkeypatch, caplog):
    _, address = serve()
    connection, blocking = connect(), connect(autocommit=False)
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
        # The limit counts only while the server does not answer at all: a query that the server works on may take
        # longer.
        with monkeypatch.context() as impatient:
            impatient.setattr(stream_log, "ANSWER_WITHIN", 0.3)
            blocking.execute("lock table pgmb.subscriptions, pgmb.dispatched")
            answer = httpx.get(f"{address}/t", timeout=SECONDS)
        assert (answer.status_code, "pgmb" in answer.text) == (503, False)
        blocking.rollback()
        publish(connection, numbered(1, 2))
        assert numbers(client.events(1)) == [1]
    assert "wait for the database: the database did not answer within 0.3 s" in caplog.text


def test_a_server_that_was_away_beyond_the_retention_tells_its_clients_of_the_gap(
    serve, connect, monkeypatch
):
    reaching = stream_log.connect_async

    async def refuse(*_, **__):
        raise ServerUnavailable("the network is down")

    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
        monkeypatch.setattr(stream_log, "connect_async", refuse)
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        publish(connection, numbered(1, 2))
        connection.execute("select pgmb.poll_for_events()")
        connection.execute("select pgmb.set_group_cursor('web', pgmb.create_event_id(clock_timestamp(), 0))")
        connection.execute("delete from pgmb.events")
        monkeypatch.setattr(stream_log, "connect_async", reaching)
        [last] = client.events()
    assert (last.type, "connect again" in last.data) == ("dropped", True)
    with listening(f"{address}/t") as client:
        publish(connection, numbered(2, 3))
        assert numbers(client.events(1)) == [2]


def test_a_clock_that_stepped_back_drops_nobody_who_connects_then(serve, connect, monkeypatch):
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        # A client that has an event gets the following events. A client that has not reached it yet would get a gap.
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
        ahead = "pgmb.create_event_id(clock_timestamp() + '5 minutes', 0)"
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(pgmb.lock_key('web'))")
            connection.execute(
                f"update pgmb.subscription_groups set last_read_event_id = {ahead} where id = 'web'"
            )
        assert client.events()[-1].type == "dropped"
    with listening(f"{address}/t") as client:
        for number in range(1, 4):
            publish(connection, numbered(number, number + 1))
            assert numbers(client.events(1)) == [number]


def test_streams_go_on_after_the_clock_stepped_back(serve, connect, monkeypatch, caplog):
    kept, keep = threading.Semaphore(0), StreamLog.keep

    async def note(*args):
        found = await keep(*args)
        kept.release()
        return found

    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    monkeypatch.setattr(StreamLog, "keep", note)
    monkeypatch.setattr(stream_log, "CLOCK", f"{stream_log.CLOCK} + {3600 * 10**6}")
    _, address = serve()
    with listening(f"{address}/t") as client:
        for number in range(3):
            assert kept.acquire(timeout=SECONDS)
            publish(connect(), numbered(number, number + 1))
            assert numbers(client.events(1)) == [number]
    assert "wait for the database" not in caplog.text


def test_a_subscription_that_is_gone_drops_its_clients(serve, connect, monkeypatch):
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        [(subscription_id,)] = connection.execute("select id from pgmb.subscriptions").fetchall()
        assert unsubscribe(connection, subscription_id)
        [last] = client.events()
    assert (last.type, "expired" in last.data) == ("dropped", True)


def test_the_end_of_the_server_ends_the_streams(db, connect, tmp_path):
    app = tmp_path / "app.py"
    app.write_text(
        "from fastapi import FastAPI\n"
        "from airflow_pgchange.events import topical\n"
        "from airflow_pgchange.events.http import event_router\n"
        "from airflow_pgchange.events.streams import EventStreams\n"
        f"streams = EventStreams({db!r}, 'web')\n"
        "app = FastAPI()\n"
        "app.include_router(event_router(streams, lambda name: topical(name)))\n"
    )
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--app-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        stack.enter_context(server)
        stack.callback(server.kill)
        assert server.stderr is not None
        while "Uvicorn running" not in server.stderr.readline():
            assert server.poll() is None
        with listening(f"http://127.0.0.1:{port}/t") as client:
            publish(connect(), numbered(0, 1))
            client.events(1)
            server.send_signal(signal.SIGTERM)
            assert client.events() == []
        _, errors = server.communicate(timeout=SECONDS)
    assert "Traceback" not in errors
    assert "Finished server process" in errors


async def test_a_group_of_another_reader_is_refused(db, connect):
    subscribe(connect(), "g", topical("t"))
    with pytest.raises(InvalidArgument, match="would lose events"):
        async with EventStreams(db, "g").running():
            pytest.fail("it runs")


def test_an_idle_client_must_be_told_often_enough(db):
    with pytest.raises(InvalidArgument, match="keep_alive"):
        event_router(EventStreams(db, "g", retention=timedelta(seconds=10)), may_read, keep_alive=10)


@pytest.mark.parametrize(
    "options", [{"replay_limit": 0}, {"buffer": 0}, {"max_clients": 0}, {"retention": timedelta()}]
)
def test_a_limit_that_is_none_is_refused(db, options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        EventStreams(db, "g", **options)
