"""The relay's side of the protocol, without a network, for any bytes in any pieces."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_pgchange.errors import ClientRefused
from airflow_pgchange.topology.frames import CANCEL, GSS, LONGEST_MESSAGE, SSL
from airflow_pgchange.topology.protocol import EARLY, Session, State, Wish
from airflow_pgchange.topology.startup_options import check_word, options_of
from airflow_pgchange.topology.statements import selected
from tests.relay_session import WORD, kinds, message, packet, refused, registered, request, sent, trusting


def test_a_client_that_says_the_word_is_registered_before_it_is_ready():
    session = trusting()
    data, wishes = sent(session.receive(packet(WORD)))
    assert (kinds(data), wishes) == (b"RSSSSSSSK", [Wish.REGISTER])
    assert kinds(sent(session.ready())[0]) == b"Z"


@given(st.lists(st.integers(1, 60), max_size=40))
def test_it_is_the_same_in_whatever_pieces_the_bytes_come(cuts):
    data = request(GSS) + request(SSL)
    whole, pieces = trusting(), trusting()
    # A request for encryption must come alone.
    for one in (data[:8], data[8:]):
        assert sent(whole.receive(one)) == (b"N", [])
        assert b"".join(sent(pieces.receive(bytes([byte])))[0] for byte in one) == b"N"
    hello = packet(WORD)
    steps, at = [], 0
    for size in [*cuts, len(hello)]:
        steps += pieces.receive(hello[at : at + size])
        at += size
    whole_steps = list(whole.receive(hello))
    assert kinds(sent(steps)[0]) == kinds(sent(whole_steps)[0])
    assert pieces.state is whole.state is State.WAITING


@given(st.binary(max_size=300))
@example(struct.pack("!II", 9, 3 << 16) + b"\0")
def test_whatever_bytes_come_first_a_session_answers_waits_or_refuses(data):
    with suppress(ClientRefused):
        list(trusting().receive(data))


@given(st.lists(st.tuples(st.sampled_from(b"BCDEFHPQSXcdfp!"), st.binary(max_size=60)), max_size=8))
def test_whatever_messages_come_later_a_session_answers_waits_or_refuses(messages):
    session = registered()
    with suppress(ClientRefused):
        for kind, body in messages:
            list(session.receive(message(bytes([kind]), body)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("!I", 7), "7 bytes"),
        (struct.pack("!I", 10_001), "10001 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes: this server takes"),
        (b"\x16\x03\x01\x02\x00\x01", "bytes: this server takes"),
        (packet(WORD, version=2 << 16), "protocol 2.0"),
        (request(3 << 16, b"user\0ann"), "terminating zero bytes"),
        (request(3 << 16, b"user\0ann\0word\0\0\0"[:-1]), "not pairs"),
        (request(3 << 16, b"user\0\xff\xfe\0\0"), "UTF-8"),
        (packet({"smart_connector": "0.1"}), "without a user"),
        (packet({"user": "ann"}), "takes no SQL"),
        (packet({"user": "ann", "smart_connector": "9"}), "smart_connector = 9"),
        (request(SSL) + packet(WORD), "between"),
    ],
)
def test_a_startup_that_is_none_is_refused_with_the_reason(data, reason):
    assert reason in str(refused(trusting(), data))


def test_an_oversized_message_is_refused_before_it_is_read():
    session = registered()
    assert "bytes" in str(refused(session, b"Q" + struct.pack("!I", LONGEST_MESSAGE + 1)))


def test_a_request_to_cancel_is_taken_and_nothing_is_sent():
    assert sent(trusting().receive(request(CANCEL, b"12345678"))) == (b"", [Wish.LEAVE])


def test_a_newer_minor_protocol_is_negotiated_down():
    data, _ = sent(trusting().receive(packet({**WORD, "_pq_.magic": "on"}, version=(3 << 16) + 2)))
    assert kinds(data)[:1] == b"v"
    assert b"_pq_.magic\0" in data


@pytest.mark.parametrize(
    "parameters",
    [
        {"smart_connector": "0.1"},
        {"picodata_catalog_cdc": "1"},
        {"options": "smart_connector=0.1"},
        {"options": "-c smart_connector=0.1"},
        {"options": "-csmart_connector=0.1 -c search_path=a\\ b"},
        {"options": "--smart-connector=0.1"},
        {"options": "-c picodata_catalog_cdc=1", "work_mem": "1"},
        {"options": "smart_connector=9", "smart_connector": "0.1"},
    ],
)
def test_the_word_is_heard_raw_and_in_the_options_where_raw_wins(parameters):
    check_word(parameters)


@pytest.mark.parametrize(
    ("parameters", "hint"),
    [
        ({"smart_connector": "0.2"}, "smart_connector = 0.1"),
        ({"options": "-c work_mem=1"}, "for SQL connect"),
    ],
)
def test_a_refused_client_gets_advice(parameters, hint):
    with pytest.raises(ClientRefused) as caught:
        check_word(parameters)
    assert hint in caught.value.hint


def test_a_backslash_in_the_options_takes_the_meaning_from_what_follows():
    assert dict(options_of(r"-c a=b\ c -c d=e\\f")) == {"a": "b c", "d": "e\\f"}


def test_a_client_gets_its_refusal_when_it_can_read_it():
    session = Session(1, None, refusal=ClientRefused("53300", "full"))
    assert sent(session.receive(request(SSL))) == (b"N", [])
    assert str(refused(session, packet(WORD))) == "full"


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("select 1", b"TDCZ"),
        (" SELECT 1 ; ", b"TDCZ"),
        ("", b"IZ"),
        (";", b"IZ"),
        ("-- ping", b"IZ"),
        ("select 1; select 1", b"TDCTDCZ"),
        ("select 2", b"EZ"),
        ("drop table x", b"EZ"),
        ("select 1; drop table x", b"EZ"),
        ("set application_name to 'a;b'; rollback", b"CCZ"),
        ("set client_encoding = 'latin1'", b"EZ"),
        ("set x = 1 drop table x", b"EZ"),
        ("'", b"EZ"),
    ],
)
def test_a_simple_query_is_answered(query, answer):
    assert kinds(sent(registered().receive(message(b"Q", query.encode() + b"\0")))[0]) == answer


RESETS = {
    "asyncpg": ("SELECT pg_advisory_unlock_all();\nCLOSE ALL;\nUNLISTEN *;\nRESET ALL;", b"TDCCCCZ"),
    "Npgsql": ("DISCARD ALL", b"CZ"),
    "Npgsql with prepared statements": (
        "SET SESSION AUTHORIZATION DEFAULT;RESET ALL;CLOSE ALL;UNLISTEN *;SELECT pg_advisory_unlock_all();"
        "DISCARD SEQUENCES;DISCARD TEMP",
        b"CCCCTDCCCZ",
    ),
    "psycopg2": ("ABORT; RESET ALL; SET SESSION AUTHORIZATION DEFAULT;", b"CCCZ"),
    "SQLAlchemy": ("ROLLBACK", b"CZ"),
    "HikariCP": ("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", b"CZ"),
    "HikariCP's levels": ("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED", b"CZ"),
    "pgjdbc": ("SET application_name = 'PostgreSQL JDBC Driver'", b"CZ"),
    "PgBouncer": ("DISCARD ALL; DEALLOCATE ALL", b"CCZ"),
}
"""By pool: the statements that it sends when a connection is returned or taken, and the kinds of PostgreSQL's
replies."""


@pytest.mark.parametrize("pool", RESETS)
def test_statements_that_connection_pools_send_are_answered(pool):
    query, answer = RESETS[pool]
    assert kinds(sent(registered().receive(message(b"Q", query.encode() + b"\0")))[0]) == answer


def extended(query, result_format=0):
    bind = struct.pack("!hhhh", 0, 0, 1, result_format)
    return (
        message(b"P", b"s\0" + query.encode() + b"\0\0\0")
        + message(b"B", b"p\0s\0" + bind)
        + message(b"D", b"Pp\0")
        + message(b"E", b"p\0\0\0\0\0")
        + message(b"C", b"Pp\0")
        + message(b"S")
    )


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("select 1", b"12TDC3Z"),
        ("", b"12nI3Z"),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE", b"12nC3Z"),
        ("select pg_advisory_unlock_all()", b"12TDC3Z"),
        ("select 2", b"EZ"),
        ("select 1; select 1", b"EZ"),
    ],
)
def test_an_extended_query_is_answered_and_after_an_error_nothing_until_sync(query, answer):
    assert kinds(sent(registered().receive(extended(query)))[0]) == answer


def test_a_client_may_ask_for_the_binary_format():
    data, _ = sent(registered().receive(extended("select 1", result_format=1)))
    assert struct.pack("!HIi", 1, 4, 1) in data


def test_a_query_before_the_snapshot_is_answered_after_it():
    session = trusting()
    list(session.receive(packet(WORD) + message(b"Q", b"\0")))
    assert kinds(sent(session.ready())[0]) == b"ZIZ"


def test_a_client_that_sends_too_much_before_the_snapshot_is_refused():
    session = trusting()
    list(session.receive(packet(WORD)))
    few = message(b"Q", bytes(EARLY - 5))
    assert list(session.receive(few)) == []
    assert "before the snapshot" in str(refused(session, b"Q"))


@pytest.mark.parametrize("reset", ["discard all", "deallocate all"])
def test_deallocating_statements_makes_room_for_others(reset):
    session = registered()
    list(session.receive(message(b"P", b"s\0select 1\0\0\0")))
    list(session.receive(message(b"Q", reset.encode() + b"\0")))
    assert kinds(sent(session.receive(message(b"D", b"Ss\0")))[0]) == b"E"


@pytest.mark.parametrize("letter", ["'", '"', "-", " ", ";", "-- ", "a'", "set x = ''"])
def test_no_query_takes_long_to_read(letter):
    """The text has the largest allowed length. An algorithm of quadratic time would not finish."""
    assert selected((letter * LONGEST_MESSAGE)[:LONGEST_MESSAGE]) in (None, [])


def test_names_are_bounded():
    session = registered()
    many = b"".join(message(b"P", f"s{n}\0select 1\0".encode() + b"\0\0") for n in range(101))
    assert kinds(sent(session.receive(many))[0]) == b"1" * 100 + b"E"


@pytest.mark.parametrize(
    ("kind", "body"), [(b"P", b"%s\0select 1\0\0\0"), (b"B", b"%s\0s\0" + bytes(6)), (b"D", b"S%s\0")]
)
def test_a_name_is_no_longer_than_one_of_postgresql(kind, body):
    known = message(b"P", b"s\0select 1\0\0\0") + message(b"P", b"%s\0select 1\0\0\0" % (b"n" * 63))
    session = registered()
    list(session.receive(known))
    assert kinds(sent(session.receive(message(kind, body % (b"n" * 63))))[0]) != b"E"
    assert "a name of 64 bytes" in str(refused(session, message(kind, body % (b"n" * 64))))


def test_portals_end_with_their_transaction():
    session = registered()
    list(session.receive(message(b"P", b"s\0select 1\0\0\0")))
    for number in range(101):
        name = f"p{number}".encode()
        data = message(b"B", name + b"\0s\0" + struct.pack("!hhh", 0, 0, 0)) + message(b"S")
        assert kinds(sent(session.receive(data))[0]) == b"2Z"
    assert kinds(sent(session.receive(message(b"D", b"Pp0\0")))[0]) == b"E"
