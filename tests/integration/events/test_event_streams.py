"""Server-sent events: each client gets the events that it may see, once and in order. All share one connection."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from airflow_pgchange.events import Event, publish, stream_log, topical
from airflow_pgchange.events import streams as streams_module
from airflow_pgchange.events.stream import StreamPosition
from airflow_pgchange.events.streams import EventStreams
from tests.handling import numbered
from tests.streaming import check_reconnecting, numbers, serving
from tests.web import listening

MINUTE = 60 * 10**6


@pytest.fixture
def serve(db):
    """Serve streams of ``db``. Yield them and their address."""
    with serving(db) as start:
        yield start


def test_a_client_gets_what_it_may_see_and_nothing_else(serve, connect):
    _, address = serve()
    with listening(f"{address}/t") as one, listening(f"{address}/u") as other:
        [first, *_] = publish(connect(), [*numbered(0, 2), *numbered(2, 4, "u")], returning=True)
        seen = one.events(2)
        assert (numbers(seen), numbers(other.events(2))) == ([0, 1], [2, 3])
    assert one.response.headers["content-type"].startswith("text/event-stream")
    assert one.response.headers["cache-control"] == "no-store"
    assert json.loads(seen[0].data) == {"id": first, "topic": "t", "payload": {"n": 0}, "metadata": {}}


def test_a_client_that_may_not_read_is_refused(serve):
    _, address = serve()
    assert httpx.get(f"{address}/secret").status_code == 403


def test_under_a_name_that_no_topic_can_have_nothing_is_found(serve):
    _, address = serve()
    answer = httpx.get(f"{address}/a%00b")
    assert (answer.status_code, "topic" in answer.text) == (404, True)


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


def test_a_client_that_reconnects_gets_each_event_once(serve, connect):
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


def test_a_client_that_reconnects_before_its_first_event_loses_none(serve, connect):
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
        for n in range(30):
            publish(own, numbered(1000 * worker + 3 * n, 1000 * worker + 3 * n + 3))
            # Some events are committed after events with higher ids.
            if n % 5 == 0:
                own.commit()
        own.commit()

    with listening(f"{addresses[0]}/t") as client:
        at = client.last_id
    with ThreadPoolExecutor() as pool:
        publishers = [pool.submit(publish_some, worker) for worker in range(3)]
        while len(seen) < 270:
            with listening(f"{choose.choice(addresses)}/t", at) as client:
                seen += numbers(client.events(min(choose.randrange(1, 25), 270 - len(seen))))
                at, visits = client.last_id, visits + 1
        for publisher in publishers:
            publisher.result()
    assert visits > 10
    assert sorted(seen) == [1000 * worker + n for worker in range(3) for n in range(90)]


def test_events_of_many_subscriptions_come_in_order_and_once(serve, connect):
    _, address = serve(lambda name: topical(["all", name]))
    topics = [f"t{n}" for n in range(10)]
    with ExitStack() as stack:
        clients = {each: stack.enter_context(listening(f"{address}/{each}")) for each in topics}
        mixed = [Event("all" if n % 3 == 0 else topics[n % 10], {"n": n}) for n in range(300)]
        publish(connect(), mixed)
        for topic, client in clients.items():
            wanted = [event.payload["n"] for event in mixed if event.topic in ("all", topic)]
            assert numbers(client.events(len(wanted))) == wanted


def test_an_event_that_was_deleted_takes_no_other_with_it(serve, connect):
    _, address = serve()
    connection = connect()
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 1))
        [seen] = client.events(1)
        publish(connection, numbered(1, 250))
        client.events(249)
    connection.execute("delete from pgmb.events where (payload ->> 'n')::int between 7 and 120")
    with listening(f"{address}/t", seen.id) as client:
        publish(connection, numbered(250, 260))
        assert numbers(client.events(16)) == [*range(1, 7), *range(121, 131)]
        assert numbers(client.events(129)) == [*range(131, 260)]


def test_a_client_that_missed_too_many_events_is_told_of_the_gap_and_goes_on(serve, connect):
    _, address = serve(replay_limit=5)
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


def test_a_client_that_was_away_too_long_is_told_of_the_gap(serve, connect):
    _, address = serve()
    with listening(f"{address}/t") as client:
        publish(connect(), numbered(0, 1))
        [seen] = client.events(1)
    connect().execute("update pgmb.subscriptions set created_at = created_at - interval '1 hour'")
    position = StreamPosition.parse(seen.id)
    with listening(f"{address}/t", str(replace(position, seen=position.seen - 4 * MINUTE))) as client:
        publish(connect(), numbered(1, 2))
        assert numbers(client.events(1)) == [1]
    with listening(f"{address}/t", str(replace(position, seen=position.seen - 6 * MINUTE))) as client:
        [gap] = client.events(1)
    assert (gap.type, "away for longer" in gap.data) == ("gap", True)


def test_a_client_that_leaves_during_a_replay_is_told_of_the_gap_by_age(serve, connect, monkeypatch):
    clock, counted = stream_log.CLOCK, stream_log.COUNTED

    def go_on(minutes):
        monkeypatch.setattr(stream_log, "CLOCK", f"{clock} + {minutes * MINUTE}")
        monkeypatch.setattr(stream_log, "COUNTED", counted.replace(clock, stream_log.CLOCK))

    def time_of_streams():
        with listening(f"{address}/t") as client:
            return StreamPosition.parse(client.last_id).seen

    _, address = serve()
    with listening(f"{address}/t") as client:
        publish(connect(), numbered(0, 10))
        [seen, *_] = client.events(10)
    go_on(4)
    while time_of_streams() < StreamPosition.parse(seen.id).seen + 3 * MINUTE:
        pass
    with listening(f"{address}/t", seen.id) as client:
        [first, *_, last] = client.events(9)
    go_on(8)
    with listening(f"{address}/t", first.id) as client:
        [gap] = client.events(1)
    with listening(f"{address}/t", last.id) as client:
        publish(connect(), numbered(10, 11))
        assert numbers(client.events(1)) == [10]
    assert (gap.type, "away for longer" in gap.data) == ("gap", True)


@pytest.mark.parametrize("change", ["selection", "subscription"])
def test_a_client_that_reconnects_to_a_new_subscription_is_told_of_the_gap_once(serve, connect, change):
    topics = ["t"]
    _, address = serve(lambda: topical(topics))
    connection = connect()
    with listening(f"{address}/any") as client:
        publish(connection, numbered(0, 1))
        [seen] = client.events(1)
    publish(connection, numbered(1, 2))
    if change == "selection":
        topics.append("u")
    else:
        connection.execute("select pgmb.drop_consumer('web')")
    with listening(f"{address}/any", seen.id) as client:
        publish(connection, numbered(2, 3))
        [gap] = client.events(1)
    assert (gap.type, "another one than before" in gap.data) == ("gap", True)
    with listening(f"{address}/any", gap.id) as client:
        assert numbers(client.events(1)) == [2]


@pytest.mark.parametrize("text", ["1", "pm.pm.0", "pm0000000000000000000000.." + "0" * 12, "'; drop table x"])
def test_a_foreign_id_is_refused(serve, text):
    _, address = serve()
    answer = httpx.get(f"{address}/t", headers={"Last-Event-ID": text})
    assert (answer.status_code, "was not sent by this server" in answer.text) == (400, True)


def test_a_stream_looks_into_no_partition_but_those_of_its_events(serve, connect):
    _, address = serve(keep_alive=60)
    connection, other = connect(), connect(autocommit=False)
    last = "select max(partition_id::text) from pgmb.get_partitions_and_bounds('pgmb.events'::regclass)"
    [(partition,)] = connection.execute(last).fetchall()
    other.execute(f"lock table {partition} in access exclusive mode")
    with listening(f"{address}/t") as client:
        publish(connection, numbered(0, 2))
        [seen, _] = client.events(2)
    publish(connection, numbered(2, 3))
    with listening(f"{address}/t", seen.id) as client:
        assert numbers(client.events(2)) == [1, 2]


def test_an_idle_client_learns_how_far_it_is(serve, connect):
    _, address = serve(keep_alive=0.05)
    with listening(f"{address}/t") as client:
        first = StreamPosition.parse(client.last_id)
        comments = [next(client.messages()) for _ in range(3)]
        publish(connect(), numbered(0, 1, "u"))
        while StreamPosition.parse(comments[-1].id).seen <= first.seen:
            comments.append(next(client.messages()))
        assert {(each.comment, each.data) for each in comments} == {("still here", "")}


def test_many_clients_share_one_connection_and_one_subscription(serve, connect):
    streams, address = serve()
    connection = connect()
    with ExitStack() as stack:
        clients = [stack.enter_context(listening(f"{address}/t")) for _ in range(12)]
        assert streams.clients == 12
        publish(connection, numbered(0, 2))
        assert [numbers(client.events(2)) for client in clients] == 12 * [[0, 1]]
        backends = connection.execute(
            "select count(*) from pg_stat_activity where datname = current_database() "
            "and pid <> pg_backend_pid() and backend_type = 'client backend'"
        ).fetchone()
        assert backends == (1,)
    assert connection.execute("select count(*) from pgmb.subscriptions").fetchone() == (1,)


async def test_idle_clients_cost_the_database_nothing(db, connect, monkeypatch):
    asked, enough, rows = [], asyncio.Event(), stream_log.StreamLog._rows

    async def counted(self, query, values=()):
        asked.append(query)
        if asked.count(stream_log.LIVE) == 20:
            enough.set()
        return await rows(self, query, values)

    # Heartbeats would be counted, too.
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 3600.0)
    streams = EventStreams(db, "web", poll_interval=0.01)
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


def test_events_that_are_too_old_to_be_replayed_are_let_go(serve, connect, monkeypatch):
    monkeypatch.setattr(streams_module, "KEEP_EVERY", 0.01)
    _, address = serve(retention=timedelta(seconds=1), keep_alive=0.1)
    connection = connect()
    with listening(f"{address}/t") as client:
        [published] = publish(connection, numbered(0, 1), returning=True)
        client.events(1)
        while connection.execute("select 1 from pgmb.holders() where reason = 'unread'").fetchone():
            next(client.messages())
        [(cursor,)] = connection.execute("select last_read_event_id from pgmb.subscription_groups").fetchall()
    assert cursor > published


def test_events_that_may_be_replayed_are_kept(serve, connect, monkeypatch):
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


def test_a_role_with_the_rights_that_are_named_can_serve(serve, connect, role):
    connection, server = connect(), role("streams")
    for grant in ("grant_subscriber", "grant_consumer"):
        connection.execute(f"select pgmb.{grant}(%s::regrole)", [server.name])
    _, address = serve(conninfo=server.conninfo)
    check_reconnecting(address, connection)


def test_streams_work_behind_a_pooler(serve, connect, pgbouncer):
    _, address = serve(conninfo=pgbouncer)
    check_reconnecting(address, connect())
