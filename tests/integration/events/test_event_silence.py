"""Handlers, streams and publishers whose server falls silent behind a proxy."""

from __future__ import annotations

import time

import pytest

from airflow_pgchange.errors import ConnectionLost
from airflow_pgchange.events import Handler, Publisher, publish
from tests.handling import Seen, group, numbered, subscribed
from tests.silence import TIMEOUT, ended, impatient, through
from tests.streaming import numbers, serving
from tests.waiting import until
from tests.web import listening

FREE = "select not exists (select from pg_locks where locktype = 'advisory' and objsubid = 1)"


@pytest.mark.parametrize("serve_new", [False, True])
def test_handlers_whose_server_falls_silent_end_and_let_go_of_the_group(db, connect, proxy, serve_new):
    connection = subscribed(connect())
    publish(connection, numbered(0, 10))
    seen = Seen(lambda _: proxy.fall_silent(serve_new=serve_new))
    silent = group(through(proxy, db), Handler("h", seen), limit=5)
    assert isinstance(ended(lambda: silent.run(until="empty")), ConnectionLost)
    until(connection, FREE, patience=10)
    again = Seen()
    assert group(db, Handler("h", again)).run(until="empty").events == 10
    assert again.numbers == list(range(10))


def test_a_handler_may_take_longer_than_a_server_may_be_silent(db, connect):
    publish(subscribed(connect()), numbered(0, 1))
    slow = Handler("h", Seen(lambda _: time.sleep(2.2 * TIMEOUT)))
    assert group(impatient(db), slow).run(until="empty").events == 1


def test_streams_go_on_by_another_connection_when_theirs_falls_silent(db, connect, proxy):
    connection = connect()
    with serving(db) as serve:
        _, address = serve(conninfo=through(proxy, db))
        with listening(f"{address}/t") as client:
            publish(connection, numbered(0, 1))
            assert numbers(client.events(1)) == [0]
            proxy.fall_silent(serve_new=True)
            silent_at = time.monotonic()
            publish(connection, numbered(1, 2))
            assert numbers(client.events(1)) == [1]
    assert time.monotonic() - silent_at < 10


def test_a_publisher_sends_again_what_a_silent_server_may_not_have_got(db, connect, proxy):
    with Publisher(through(proxy, db), max_age=0) as publisher:
        publisher.put(*numbered(0, 1))
        publisher.flush(30)
        proxy.fall_silent(serve_new=True)
        publisher.put(*numbered(1, 2))
        publisher.flush(10)
    events = connect().execute("select payload ->> 'n' from pgmb.events order by id").fetchall()
    assert events == [("0",), ("1",)]
