"""Sign-in to the relay: passwords, their proofs, and encryption."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramClient

from airflow_pgchange.errors import ClientRefused, InvalidArgument
from airflow_pgchange.topology.auth import read_users
from airflow_pgchange.topology.frames import SSL
from airflow_pgchange.topology.protocol import Session, Wish
from tests.relay_session import WORD, kinds, message, packet, refused, request, sent


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
    return ready(path)


def ready(path, secret=b"secret of the catalogue"):
    """Return the users of a file, with the secret that a relay gets from its catalogue."""
    found = read_users(path)
    found.secret = secret
    return found


def proof(session, user, password, binding=None):
    """Sign in with another library's implementation, and return the last request to the session."""
    mechanism = "SCRAM-SHA-256" if binding is None else "SCRAM-SHA-256-PLUS"
    client = ScramClient([mechanism], user, password, binding and ("tls-server-end-point", binding))
    first = client.get_client_first().encode()
    data, _ = sent(
        session.receive(message(b"p", mechanism.encode() + b"\0" + struct.pack("!I", len(first)) + first))
    )
    client.set_server_first(data[9:].decode())
    return sent(session.receive(message(b"p", client.get_client_final().encode())))[1]


@pytest.mark.parametrize(("user", "password"), [("ann", "secret"), ("bob", "word")])
def test_a_client_with_the_right_password_is_registered(users, user, password):
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
    """A session behind TLS with b"ours" as the channel binding of its certificate."""
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
    assert "man in the middle" in str(refused(encrypted(users), message(b"p", body)))


def test_nothing_but_a_proof_is_taken_before_it(users):
    session = Session(1, users)
    list(session.receive(packet(WORD)))
    assert "password was asked for" in str(refused(session, message(b"Q", b"select 1\0")))


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_invalid_proof_is_refused(users, first, final):
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


def test_a_client_that_must_encrypt_gets_an_error_before_any_question(users):
    session = Session(1, users, encrypts=True, demands=True)
    found = refused(session, packet({"user": "ann"}))
    assert (found.sqlstate, str(found)) == ("28000", "this server takes encrypted connections only")
    assert found.hint == "connect with sslmode=require, or a stricter one"


def test_a_client_that_encrypts_as_required_is_asked_for_a_password(users):
    session = Session(1, users, encrypts=True, demands=True)
    assert sent(session.receive(request(SSL))) == (b"S", [Wish.ENCRYPT])
    assert kinds(sent(session.receive(packet(WORD)))[0]) == b"R"


def asked(users, user):
    """Return the salt and the iterations that the relay sends to a user."""
    session = Session(1, users)
    list(session.receive(packet({**WORD, "user": user})))
    first = b"n,,n=,r=abc"
    body = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
    answer = sent(session.receive(message(b"p", body)))[0][9:].decode()
    return answer.split(",")[1:]


def test_a_stranger_is_asked_as_if_it_were_known(tmp_path):
    path = tmp_path / "users"
    path.write_text(f"ann {verifier('secret', salt=b'12345678', iterations=8192)}\n")
    (salt, iterations), (mock, mocked) = (asked(ready(path), user) for user in ("ann", "stranger"))
    assert (len(salt), iterations) == (len(mock), mocked)


def test_two_relays_that_share_a_secret_ask_a_stranger_alike(tmp_path):
    path = tmp_path / "users"
    path.write_text(f"ann {verifier('secret')}\n")
    one, other = ready(path), ready(path)
    assert asked(one, "stranger") == asked(other, "stranger") != asked(one, "another")
    assert asked(one, "stranger") != asked(ready(path, b"of another catalogue"), "stranger")


def test_strangers_are_asked_for_as_many_iterations_as_users_are_each_as_often(tmp_path):
    path = tmp_path / "users"
    path.write_text(
        f"ann {verifier('x', iterations=1)}\nbob {verifier('x', iterations=2)}\neve {verifier('x', iterations=2)}\n"
    )
    users = ready(path)
    strangers = [asked(users, f"stranger {number}")[1] for number in range(300)]
    assert 50 < strangers.count("i=1") < 150
    assert strangers.count("i=1") + strangers.count("i=2") == 300


def test_a_client_that_connects_early_is_asked_once_the_catalogue_is_reached(tmp_path):
    path = tmp_path / "users"
    path.write_text(f"ann {verifier('secret')}\n")
    users = read_users(path)
    session = Session(1, users)
    assert sent(session.receive(packet(WORD))) == (b"", [])
    users.secret = b"secret of the catalogue"
    assert kinds(sent(session.go_on())[0]) == b"R"
    assert proof(session, "ann", "secret") == [Wish.REGISTER]
    assert sent(session.go_on()) == (b"", [])
