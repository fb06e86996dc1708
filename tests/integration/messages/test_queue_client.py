"""The calls of clients of message queues, in the order of their manual.

Drivers that prepare statements let the server determine the types of parameters; psycopg states them itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

pytestmark = pytest.mark.hstore

Send = Callable[..., list[tuple[Any, ...]]]
"""Sends a statement with its parameters, $1 and so on, and returns the rows."""


@contextmanager
def by_psycopg(db: str) -> Iterator[Send]:
    with psycopg.RawCursor(psycopg.connect(db, autocommit=True)) as cursor:

        def send(statement: str, *parameters: object) -> list[tuple[Any, ...]]:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

        yield send
        cursor.connection.close()


@contextmanager
def by_asyncpg(db: str) -> Iterator[Send]:
    place = conninfo_to_dict(db)
    with asyncio.Runner() as runner:
        connection = runner.run(
            asyncpg.connect(
                host=place["host"], port=int(place["port"]), user=place["user"], database=place["dbname"]
            )
        )
        runner.run(connection.set_builtin_type_codec("hstore", codec_name="pg_contrib.hstore"))

        def send(statement: str, *parameters: object) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in runner.run(connection.fetch(statement, *parameters))]

        yield send
        runner.run(connection.close())


@pytest.fixture(params=[by_psycopg, by_asyncpg], ids=["psycopg", "asyncpg"])
def send(request, db):
    with request.param(db) as sending:
        yield sending


def test_a_client_goes_through_the_manual(send):
    send("select mbus.create_queue($1, $2)", "mail", 16)

    [[iid]] = send(
        "select mbus.post_mail(hstore($1::text, $2::text), properties => hstore('STATE', $3::text))",
        "to", "a", "DONE",
    )  # fmt: skip
    [[other]] = send("select mbus.post($1, hstore('to', 'b'))", "mail")
    assert [iid, other] == ["mail.1", "mail.2"]
    send(
        "select mbus.post_mail('to=>c', null, null, (now() + '1h'::interval)::timestamp, "
        "(now() + '2h'::interval)::timestamp, mbus.get_iid('mail'))"
    )
    send("select mbus.post_mail('to=>d', expires => (now() - '1h'::interval)::timestamp)")
    assert send("select mbus.peek_mail(), mbus.peek_mail($1), mbus.peek_mail('mail.99')", iid) == [
        (True, True, False)
    ]

    query = "select iid, data -> 'to', headers -> 'destination' from mbus.consume($1)"
    assert send(query, "mail") == [("mail.1", "a", "mail")]
    assert send(query, "mail") == [("mail.2", "b", "mail")]
    assert send(query, "mail") == []
    # Delete received and expired messages now. Without this call they are deleted later.
    send("select mbus.clear_queue_mail()")
    assert send("select mbus.is_msg_exists($1), mbus.estimated_messages($2)", "mail.3", "mail") == [(True, 1)]
    assert send("select data -> 'to' from mbus.take($1)", "mail.3") == [("c",)]

    send(
        "select mbus.create_consumer($1::text, $2::text, $3::text)",
        "done", "mail", "(t.properties->'STATE')='DONE'",
    )  # fmt: skip
    send("select mbus.post_mail('to=>e', null, 'STATE=>DONE'), mbus.post_mail('to=>f', null, 'STATE=>NEW')")
    assert send("select data -> 'to' from mbus.consume($1, $2)", "mail", "done") == [("e",)]
    assert send("select data -> 'to' from mbus.consume_mail_by_done()") == []
    assert send("select data -> 'to' from mbus.consumen_mail_by_default($1)", 10) == [("e",), ("f",)]

    [[first]] = send("select mbus.post_mail('do=>create', null, 'STATE=>DONE')")
    [[second]] = send(
        "select mbus.post('mail', 'do=>limit', hstore('consume_after', $1::text))", f"{{{first}}}"
    )
    assert send("select iid, data -> 'do' from mbus.consume('mail')") == [(first, "create")]
    assert send("select iid, data -> 'do' from mbus.consume('mail')") == []
    assert send("select iid, data -> 'do' from mbus.consume('mail', 'done')") == [(first, "create")]
    assert send("select iid, data -> 'do' from mbus.consume('mail')") == [(second, "limit")]
    send("select mbus.drop_consumer('done', 'mail')")

    [[taken]] = send("select mbus.post_mail('to=>g')")
    assert send("select data -> 'to' from mbus.take_from_mail_by_default($1)", taken) == [("g",)]
    send("select mbus.clear_queue_mail()")
    assert send("select mbus.peek_mail()") == [(False,)]
    send("select mbus.create_queue('copies', 2)")
    send("select mbus.create_trigger('mail', 'copies', $1)", "(t.data->'to')='h'")
    send("select mbus.create_view('mail')")
    send("insert into public.mail_q (data) values ('to=>h'), ('to=>i')")
    assert send("select data -> 'to' from public.mail_q") == [("h",)]
    assert send("select data -> 'to' from mbus.consume('copies')") == [("h",)]

    [[queue]] = send("select mbus.create_temporary_queue()")
    send("select mbus.post($1, 'a=>answer')", queue)
    assert send("select data -> 'a' from mbus.consume($1)", queue) == [("answer",)]
    [[name]] = send("select mbus.create_temporary_consumer($1, $2)", "mail", "(t.data->'to')='j'")
    send("select mbus.post_mail('to=>j')")
    assert send("select data -> 'to' from mbus.consume($1, $2)", "mail", name) == [("j",)]
    send("select mbus.clear_tempq()")

    send("select mbus.drop_trigger('mail', 'copies')")
    send("select mbus.drop_queue($1)", "copies")
    send("drop view public.mail_q")
    send("select mbus.drop_queue($1)", "mail")
    assert send("select count(*) from mbus.queue") == [(0,)]
