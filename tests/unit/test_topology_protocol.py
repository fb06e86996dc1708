"""The relay's side of the protocol, tried without a network: whatever bytes come, in whatever pieces."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scramp import ScramClient

from airflow_pgchange.feeds.errors import ClientRefused, InvalidArgument
from airflow_pgchange.topology.auth import read_users
from airflow_pgchange.topology.protocol import CANCEL, GSS, LONGEST_MESSAGE, SSL
from airflow_pgchange.topology.session import EARLY, Send, Session, State, Wish
from airflow_pgchange.topology.statements import selected
from airflow_pgchange.topology.words import check_word, options_of

WORD = {"user": "ann", "smart_connector": "0.1"}


def packet(parameters, version=3 << 16):
    pairs = "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode()
    return request(version, pairs + b"\0")


def request(code, rest=b""):
    return struct.pack("!II", 8 + len(rest), code) + rest


def message(kind, body=b""):
    return kind + struct.pack("!I", 4 + len(body)) + body


def verifier(password, salt=b"0123456789abcdef", iterations=4096):
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    stored = hashlib.sha256(client_key).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    salt64, stored64, server64 = (base64.b64encode(part).decode() for part in (salt, stored, server))
    return f"SCRAM-SHA-256${iterations}:{salt64}${stored64}:{server64}"


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "users"
    path.write_text(f'# who may\nann {verifier("secret")}\n"bob" "{verifier("word")}"\n')
    return read_users(path)


def trusting():
    return Session(1, None)


def sent(steps):
    """The bytes of all replies, and the wishes."""
    steps = list(steps)
    return b"".join(step.data for step in steps if isinstance(step, Send)), [
        step for step in steps if isinstance(step, Wish)
    ]


def kinds(data):
    """The kinds of the messages in what was sent."""
    found = b""
    while data:
        found += data[:1]
        data = data[1 + struct.unpack("!I", data[1:5])[0] :]
    return found


def registered():
    session = trusting()
    assert sent(session.receive(packet(WORD)))[1] == [Wish.REGISTER]
    list(session.ready())
    return session


def refused(session, data):
    with pytest.raises(ClientRefused) as caught:
        list(session.receive(data))
    return caught.value


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
        (request(3 << 16, b"user\0ann"), "does not end"),
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
def test_who_is_refused_is_told_what_to_say(parameters, hint):
    with pytest.raises(ClientRefused) as caught:
        check_word(parameters)
    assert hint in caught.value.hint


def test_a_backslash_in_the_options_takes_the_meaning_from_what_follows():
    assert dict(options_of(r"-c a=b\ c -c d=e\\f")) == {"a": "b c", "d": "e\\f"}


def proof(session, user, password, binding=None):
    """Sign in as another library does, and return what the session wishes at last."""
    mechanism = "SCRAM-SHA-256" if binding is None else "SCRAM-SHA-256-PLUS"
    client = ScramClient([mechanism], user, password, binding and ("tls-server-end-point", binding))
    first = client.get_client_first().encode()
    data, _ = sent(
        session.receive(message(b"p", mechanism.encode() + b"\0" + struct.pack("!I", len(first)) + first))
    )
    client.set_server_first(data[9:].decode())
    return sent(session.receive(message(b"p", client.get_client_final().encode())))[1]


@pytest.mark.parametrize(("user", "password"), [("ann", "secret"), ("bob", "word")])
def test_who_knows_the_password_is_registered(users, user, password):
    session = Session(1, users)
    data, wishes = sent(session.receive(packet({**WORD, "user": user})))
    assert (b"SCRAM-SHA-256\0" in data, wishes) == (True, [])
    assert proof(session, user, password) == [Wish.REGISTER]


@pytest.mark.parametrize(("user", "password"), [("ann", "other"), ("stranger", "secret")])
def test_a_wrong_password_and_an_unknown_user_are_refused_alike(users, user, password):
    session = Session(1, users)
    list(session.receive(packet({**WORD, "user": user})))
    with pytest.raises(ClientRefused, match=f'password authentication failed for user "{user}"') as caught:
        proof(session, user, password)
    assert caught.value.sqlstate == "28P01"


def encrypted(users):
    """A session behind TLS whose certificate is bound to proofs as b"ours"."""
    session = Session(1, users, encrypts=True, binding=b"ours")
    assert sent(session.receive(request(SSL))) == (b"S", [Wish.ENCRYPT])
    list(session.receive(packet(WORD)))
    return session


def test_a_proof_is_bound_to_the_certificate_that_the_client_saw(users):
    assert proof(encrypted(users), "ann", "secret", b"ours") == [Wish.REGISTER]
    with pytest.raises(ClientRefused, match="password authentication failed"):
        proof(encrypted(users), "ann", "secret", b"of somebody between us")


def test_a_client_from_whom_binding_was_hidden_is_refused(users):
    first = b"y,,n=,r=abc"
    body = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
    assert "hidden" in str(refused(encrypted(users), message(b"p", body)))


def test_who_is_not_wanted_is_told_so_when_it_can_hear_it():
    session = Session(1, None, refusal=ClientRefused("53300", "full"))
    assert sent(session.receive(request(SSL))) == (b"N", [])
    assert str(refused(session, packet(WORD))) == "full"


def test_nothing_but_a_proof_is_taken_before_it(users):
    session = Session(1, users)
    list(session.receive(packet(WORD)))
    assert "password was asked for" in str(refused(session, message(b"Q", b"select 1\0")))


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_whatever_is_sent_as_a_proof_is_refused(users, first, final):
    session = Session(1, users)
    list(session.receive(packet(WORD)))
    with pytest.raises(ClientRefused):
        body = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
        list(session.receive(message(b"p", body) + message(b"p", final)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no user"),
        ("ann md5abc", "line 1: write a name"),
        ("\nann", "line 2: write a name"),
        ("ann SCRAM-SHA-256$4096:abcde$" + "a" * 43 + "=:" + "a" * 43 + "=", "line 1: write a name"),
        ("ann SCRAM-SHA-256$4096:abcd$abc:def", "line 1: write a name"),
        ("ann 'x", "line 1"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_users_that_is_none_is_refused_with_the_line(tmp_path, text, reason):
    path = tmp_path / "users"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=reason):
        read_users(path)


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
"""What pools send when a connection is given back or taken, and the kinds of PostgreSQL's answers."""


@pytest.mark.parametrize("pool", RESETS)
def test_what_pools_send_of_themselves_is_answered(pool):
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


def test_what_is_asked_before_the_snapshot_is_answered_after_it():
    session = trusting()
    list(session.receive(packet(WORD) + message(b"Q", b"\0")))
    assert kinds(sent(session.ready())[0]) == b"ZIZ"


def test_who_asks_too_much_before_the_snapshot_is_refused():
    session = trusting()
    list(session.receive(packet(WORD)))
    few = message(b"Q", bytes(EARLY - 5))
    assert list(session.receive(few)) == []
    assert "before the snapshot" in str(refused(session, b"Q"))


@pytest.mark.parametrize("reset", ["discard all", "deallocate all"])
def test_what_forgets_statements_makes_room_for_others(reset):
    session = registered()
    list(session.receive(message(b"P", b"s\0select 1\0\0\0")))
    list(session.receive(message(b"Q", reset.encode() + b"\0")))
    assert kinds(sent(session.receive(message(b"D", b"Ss\0")))[0]) == b"E"


@pytest.mark.parametrize("letter", ["'", '"', "-", " ", ";", "-- ", "a'", "set x = ''"])
def test_no_query_takes_long_to_read(letter):
    """As long as one may be: what took the square of that would not end."""
    assert selected((letter * LONGEST_MESSAGE)[:LONGEST_MESSAGE]) in (None, [])


def test_who_must_encrypt_is_told_so_before_anything_is_asked(users):
    session = Session(1, users, encrypts=True, demands=True)
    found = refused(session, packet({"user": "ann"}))
    assert (found.sqlstate, str(found)) == ("28000", "this server takes encrypted connections only")
    assert found.hint == "connect with sslmode=require, or a stricter one"


def test_who_encrypts_where_it_must_is_asked_for_a_password(users):
    session = Session(1, users, encrypts=True, demands=True)
    assert sent(session.receive(request(SSL))) == (b"S", [Wish.ENCRYPT])
    assert kinds(sent(session.receive(packet(WORD)))[0]) == b"R"


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


def test_a_stranger_is_asked_as_if_it_were_known(tmp_path):
    path = tmp_path / "users"
    path.write_text(f"ann {verifier('secret', salt=b'12345678', iterations=8192)}\n")
    asked = {}
    for user in ("ann", "stranger"):
        session = Session(1, read_users(path))
        list(session.receive(packet({**WORD, "user": user})))
        first = b"n,,n=,r=abc"
        body = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
        told = sent(session.receive(message(b"p", body)))[0][9:].decode()
        salt, count = told.split(",")[1:]
        asked[user] = len(salt), count
    assert asked["ann"] == asked["stranger"]
