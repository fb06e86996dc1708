"""Server-sent events: what a caller may see, once and in order, over one connection for all."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from airflow_pgchange.events import Event, publish, stream_log, subscribe, topical, unsubscribe
from airflow_pgchange.events import streams as streams_module
from airflow_pgchange.events.http import event_router
from airflow_pgchange.events.stream import Place
from airflow_pgchange.events.streams import EventStreams
from airflow_pgchange.feeds.errors import InvalidArgument
from demo.postgres import free_port
from tests.web import SECONDS, listening, served

ROOT = Path(__file__).parents[2]
MINUTE = 60 * 10**6


def may_read(name: str):
    """Everybody may read every topic but one."""
    if name == "secret":
        raise HTTPException(403, "not for you")
    return topical(name)


@pytest.fixture
def serve(db):
    """Serves streams of ``db``; returns them and their address."""
    with ExitStack() as stack:

        def start(may_read=may_read, group="web", conninfo=db, **options):
            named = ("keep_alive", "reconnect", "send_within")
            given = {name: options.pop(name) for name in named if name in options}
            streams = EventStreams(conninfo, group, poll_every=0.01, **options)
            app = FastAPI()
            app.include_router(event_router(streams, may_read, **given), prefix="/events")
            address = stack.enter_context(served(app, streams.stop))
            return streams, f"{address}/events"

        yield start


def numbered(start, stop, topic="t", **payload):
    return [Event(topic, {"n": n, **payload}) for n in range(start, stop)]


def numbers(messages):
    return [json.loads(message.data)["payload"]["n"] for message in messages]


def test_a_client_gets_what_it_may_see_and_nothing_else(serve, connect):
    _, address = serve()
    with listening(f"{address}/t") as one, listening(f"{address}/u") as other:
        [first, *_] = publish(connect(), [*numbered(0, 2), *numbered(2, 4, "u")], returning=True)
        seen = one.events(2)
        assert (numbers(seen), numbers(other.events(2))) == ([0, 1], [2, 3])
    assert one.response.headers["content-type"].startswith("text/event-stream")
    assert one.response.headers["cache-control"] == "no-store"
    assert json.loads(seen[0].data) == {"id": first, "topic": "t", "payload": {"n": 0}, "metadata": {}}


def test_who_may_not_read_is_refused(serve):
    _, address = serve()
    assert httpx.get(f"{address}/secret").status_code == 403


def test_a_dependency_that_returns_nothing_shows_nothing(serve, caplog):
    _, address = serve(lambda: None)
    assert httpx.get(f"{address}/t").status_code == 500
    assert "may_read must return the Selection" in caplog.text


def test_a_topic_with_line_breaks_stays_within_its_event(serve, connect):
    topic = 'a\n\nevent: dropped\ndata: {"reason": "forged"}\n\n'
    _, address = serve(lambda: topical(topic))
    with listening(f"{address}/t") as client:
        publish(connect(), [Event(topic, "line\nbreak\r\n"), Event(topic, 2)])
        first, second = client.events(2)
    assert [json.loads(each.data)["payload"] for each in (first, second)] == ["line\nbreak\r\n", 2]
    assert {first.type, second.type} == {"message"}


def test_who_connects_again_loses_nothing_and_gets_nothing_twice(serve, connect):
    _, address = serve()
    connection, late = connect(), connect(autocommit=False)
    publish(late, numbered(100, 101))
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 10))
        seen = client.events(4)
    late.commit()
    publish(connection, numbered(10, 300))
    with listening(f"{address}/t", seen[-1].id) as client:
        publish(connection, numbered(300, 310))
        seen += client.events(307)
    assert sorted(numbers(seen)) == sorted([*range(310), 100])
    assert len({json.loads(each.data)["id"] for each in seen}) == 311


def test_who_had_no_event_yet_loses_none(serve, connect):
    _, address = serve()
    with listening(f"{address}/t") as client:
        at = client.last_id
    publish(connect(), numbered(0, 3))
    with listening(f"{address}/t", at) as client:
        assert numbers(client.events(3)) == [0, 1, 2]


def test_another_process_goes_on_where_the_first_left_off(serve, connect):
    connection = connect()
    _, address = serve()
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 3))
        seen = client.events(2)
    _, elsewhere = serve()
    with listening(f"{elsewhere}/t", seen[-1].id) as client:
        publish(connection, numbered(3, 5))
        assert numbers(client.events(3)) == [2, 3, 4]


def test_a_client_that_comes_and_goes_under_load_gets_each_event_once(serve, db, connect_to):
    choose = random.Random(7)
    addresses = [serve()[1] for _ in range(2)]
    seen, at, visits = [], "", 0

    def publish_some(worker):
        own = connect_to(db, autocommit=False)
        for n in range(60):
            publish(own, numbered(1000 * worker + 3 * n, 1000 * worker + 3 * n + 3))
            # Some commits come behind those of events with higher ids.
            if n % 5 == 0:
                own.commit()
        own.commit()

    with listening(f"{addresses[0]}/t") as client:
        at = client.last_id
    with ThreadPoolExecutor() as pool:
        publishers = [pool.submit(publish_some, worker) for worker in range(3)]
        while len(seen) < 540:
            with listening(f"{choose.choice(addresses)}/t", at) as client:
                seen += numbers(client.events(min(choose.randrange(1, 40), 540 - len(seen))))
                at, visits = client.last_id, visits + 1
        for publisher in publishers:
            publisher.result()
    assert visits > 10
    assert sorted(seen) == [1000 * worker + n for worker in range(3) for n in range(180)]


def test_events_of_many_subscriptions_come_in_order_and_once(serve, connect):
    _, address = serve(lambda name: topical(["all", name]))
    topics = [f"t{n}" for n in range(20)]
    with ExitStack() as stack:
        clients = {each: stack.enter_context(listening(f"{address}/{each}")) for each in topics}
        mixed = [Event("all" if n % 3 == 0 else topics[n % 20], {"n": n}) for n in range(3000)]
        publish(connect(), mixed)
        for topic, client in clients.items():
            wanted = [event.payload["n"] for event in mixed if event.topic in ("all", topic)]
            assert numbers(client.events(len(wanted))) == wanted


def test_who_missed_too_many_is_told_of_the_gap_and_goes_on(serve, connect):
    _, address = serve(replay_events=5)
    connection = connect()
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        [seen] = client.events(1)
    with listening(f"{address}/t") as other:
        publish(connection, numbered(1, 7))
        other.events(6)
    with listening(f"{address}/t", seen.id) as client:
        [gap] = client.events(1)
        publish(connection, numbered(7, 8))
        assert (gap.type, numbers(client.events(1))) == ("gap", [7])
    assert "missed more than 5 events" in json.loads(gap.data)["reason"]


def test_who_was_away_too_long_is_told_of_the_gap(serve, connect):
    _, address = serve()
    with listening(f"{address}/t") as client:
        publish(connect(), numbered(0, 1))
        [seen] = client.events(1)
    place = Place.parse(seen.id)
    with listening(f"{address}/t", str(replace(place, seen=place.seen - 4 * MINUTE))) as client:
        publish(connect(), numbered(1, 2))
        assert numbers(client.events(1)) == [1]
    with listening(f"{address}/t", str(replace(place, seen=place.seen - 6 * MINUTE))) as client:
        [gap] = client.events(1)
    assert (gap.type, "away for longer" in gap.data) == ("gap", True)


@pytest.mark.parametrize("text", ["1", "pm.pm.0", "pm0000000000000000000000.." + "0" * 12, "'; drop table x"])
def test_a_foreign_id_is_refused(serve, text):
    _, address = serve()
    answer = httpx.get(f"{address}/t", headers={"Last-Event-ID": text})
    assert (answer.status_code, "none that was sent here" in answer.text) == (400, True)


def test_one_client_too_many_is_refused_until_another_is_gone(serve, connect):
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


def test_an_idle_client_learns_how_far_it_is(serve, connect):
    _, address = serve(keep_alive=0.05)
    with listening(f"{address}/t") as client:
        first = Place.parse(client.last_id)
        comments = [next(client.messages()) for _ in range(3)]
        publish(connect(), numbered(0, 1, "u"))
        assert [(each.comment, each.data) for each in comments] == 3 * [("still here", "")]
        assert first.seen < Place.parse(comments[-1].id).seen


def test_a_slow_client_is_dropped_with_a_reason_and_loses_nothing(serve, connect):
    _, address = serve(buffer=2**18)
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


def test_a_client_that_takes_nothing_is_left(serve, connect, caplog):
    streams, address = serve(buffer=2**18, send_within=0.2)
    connection = connect()
    with listening(f"{address}/t"), listening(f"{address}/t") as quick:
        n = 0
        while streams.clients == 2:
            publish(connection, numbered(n, n + 1, ballast="x" * 2**17))
            quick.events(1)
            n += 1
    assert "took nothing for 0.2 s" in caplog.text


def test_a_hundred_clients_share_one_connection_and_one_subscription(serve, connect):
    streams, address = serve()
    connection = connect()
    with ExitStack() as stack:
        clients = [stack.enter_context(listening(f"{address}/t")) for _ in range(100)]
        assert streams.clients == 100
        publish(connection, numbered(0, 2))
        assert [numbers(client.events(2)) for client in clients] == 100 * [[0, 1]]
        backends = connection.execute(
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        ).fetchone()
        assert backends == (1,)
    assert connection.execute("select count(*) from pgmb.subscriptions").fetchone() == (1,)


def test_a_lost_connection_loses_no_event(serve, connect):
    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
        ended = connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        ).fetchall()
        assert ended == [(True,)]
        publish(connection, numbered(1, 5))
        assert numbers(client.events(4)) == [1, 2, 3, 4]


def test_a_database_that_does_not_answer_is_away_and_comes_back(serve, connect, monkeypatch, caplog):
    monkeypatch.setattr(stream_log, "ANSWER_WITHIN", 0.3)
    _, address = serve()
    connection, blocking = connect(), connect(autocommit=False)
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        assert numbers(client.events(1)) == [0]
        blocking.execute("lock table pgmb.subscriptions, pgmb.dispatched")
        answer = httpx.get(f"{address}/t", timeout=SECONDS)
        assert (answer.status_code, "pgmb" in answer.text) == (503, False)
        blocking.rollback()
        publish(connection, numbered(1, 2))
        assert numbers(client.events(1)) == [1]
    assert "wait for the database: the database did not answer within 0.3 s" in caplog.text


async def test_idle_clients_cost_the_database_nothing(db, connect, monkeypatch):
    asked, enough, rows = [], asyncio.Event(), stream_log.StreamLog._rows

    async def counted(self, query, values=()):
        asked.append(query)
        if asked.count(stream_log.LIVE) == 20:
            enough.set()
        return await rows(self, query, values)

    streams = EventStreams(db, "web", poll_every=0.01)
    async with streams.running(), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(streams.stream(topical("t"))) for _ in range(50)]
        for client in clients:
            assert (await anext(client)).startswith(b"id: ")
        next_ones = asyncio.gather(*map(anext, clients))
        publish(connect(), numbered(0, 1))
        assert len(set(await next_ones)) == 1
        monkeypatch.setattr(stream_log.StreamLog, "_rows", counted)
        await enough.wait()
    assert len(asked) <= 2 * 20 + 2


def test_a_subscription_that_is_gone_drops_its_clients(serve, connect, monkeypatch):
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        [(subscription_id,)] = connection.execute("select id from pgmb.subscriptions").fetchall()
        assert unsubscribe(connection, subscription_id)
        [last] = client.events()
    assert (last.type, "expired" in last.data) == ("dropped", True)


def test_events_that_are_too_old_to_be_replayed_are_let_go(serve, connect, monkeypatch):
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    _, address = serve(replay_age=timedelta(seconds=1), keep_alive=0.1)
    connection = connect()
    with listening(f"{address}/t") as client:
        [published] = publish(connection, numbered(0, 1), returning=True)
        client.events(1)
        while connection.execute("select 1 from pgmb.holders() where reason = 'unread'").fetchone():
            next(client.messages())
        [(cursor,)] = connection.execute("select last_read_event_id from pgmb.subscription_groups").fetchall()
    assert cursor > published


def test_what_may_be_replayed_is_kept_from_going(serve, connect, monkeypatch):
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    _, address = serve(keep_alive=0.05)
    connection = connect()
    kept = "select last_read_event_id from pgmb.subscription_groups"
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        client.events(1)
        first = connection.execute(kept).fetchone()
        while connection.execute(kept).fetchone() == first:
            next(client.messages())
    held = connection.execute("select holder, reason, events from pgmb.holders()").fetchall()
    assert held == [("web", "unread", 1)]


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
        event_router(EventStreams(db, "g", replay_age=timedelta(seconds=10)), may_read, keep_alive=10)


@pytest.mark.parametrize(
    "options", [{"replay_events": 0}, {"buffer": 0}, {"max_clients": 0}, {"replay_age": timedelta()}]
)
def test_a_limit_that_is_none_is_refused(db, options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        EventStreams(db, "g", **options)


def test_a_role_with_the_rights_that_are_named_can_serve(serve, connect, role):
    connection, server = connect(), role("streams")
    for grant in ("grant_subscriber", "grant_consumer"):
        connection.execute(f"select pgmb.{grant}(%s::regrole)", [server.name])
    _, address = serve(conninfo=server.conninfo)
    check_reconnecting(address, connection)


def test_streams_work_behind_a_pooler(serve, connect, pgbouncer):
    _, address = serve(conninfo=pgbouncer)
    check_reconnecting(address, connect())


def check_reconnecting(address, connection):
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 2))
        [seen] = client.events(1)
    publish(connection, numbered(2, 3))
    with listening(f"{address}/t", seen.id) as client:
        assert numbers(client.events(2)) == [1, 2]
