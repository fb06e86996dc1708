"""Access to the relay: passwords, TLS, and the number of connections."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.topology import InstanceEvent, TopologyClient, service
from airflow_pgchange.topology.connection import RECORD
from airflow_pgchange.topology.replies import READY
from tests.command_line import parsed
from tests.relay_process import relay_process
from tests.relay_session import WORD, message, packet

LIMITS = {"max_clients": 3, "startup_timeout": 5}


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """Options of a relay with one user, ann, whose password is secret, and TLS."""
    folder = tmp_path_factory.mktemp("secured")
    users, certificate, key = folder / "users", folder / "cert.pem", folder / "key.pem"
    salt = os.urandom(16)
    salted = hashlib.pbkdf2_hmac("sha256", b"secret", salt, 4096)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    parts = [
        base64.b64encode(x).decode() for x in (salt, stored, hmac.digest(salted, b"Server Key", "sha256"))
    ]
    users.write_text("ann SCRAM-SHA-256$4096:{}${}:{}\n".format(*parts))
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {"users": str(users), "tls_cert": str(certificate), "tls_key": str(key)}


@pytest.mark.parametrize(
    "options",
    [
        {"sslmode": "disable"},
        {"sslmode": "require", "channel_binding": "require"},
        {"sslmode": "require", "channel_binding": "disable"},
    ],
)
def test_a_client_with_the_password_connects_with_tls_and_without(db, catalogue, secured, options):
    with (
        relay_process(db, **secured) as relay,
        TopologyClient(relay.conninfo(password="secret", **options)) as client,
    ):
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        (event,) = client.receive(30)
        assert isinstance(event, InstanceEvent)
        assert client.topology.instances["uuid-r1-i2"].state == "Offline"


def test_the_certificate_can_be_verified(db, catalogue, secured):
    with (
        relay_process(db, **secured) as relay,
        TopologyClient(
            relay.conninfo(password="secret", sslmode="verify-full", sslrootcert=secured["tls_cert"])
        ) as client,
    ):
        assert len(client.topology.instances) == 4


def test_a_large_snapshot_comes_whole_over_tls(db, catalogue, secured):
    catalogue.execute(
        "delete from topology._pico_bucket; insert into topology._pico_bucket "
        "select 'default', 2 * n, 2 * n, 'active', 'r1', 'r1' from generate_series(0, 5999) as n"
    )
    with (
        relay_process(db, **secured) as relay,
        TopologyClient(relay.conninfo(password="secret", sslmode="require")) as client,
    ):
        assert len(client.topology.buckets("default")) == 6000


@contextmanager
def encrypted(db, secured):
    """A TLS connection to a relay that trusts every client. The startup packet has been sent."""
    hello = b"user\0ann\0smart_connector\x000.1\0\0"
    tls = ssl.create_default_context(cafile=secured["tls_cert"])
    with (
        relay_process(db, tls_cert=secured["tls_cert"], tls_key=secured["tls_key"]) as relay,
        socket.create_connection(("127.0.0.1", relay.port), 30) as plain,
    ):
        plain.sendall(struct.pack("!II", 8, 80877103))
        assert plain.recv(1) == b"S"
        with tls.wrap_socket(plain, server_hostname="localhost") as found:
            found.sendall(struct.pack("!II", 8 + len(hello), 3 << 16) + hello)
            yield found


def test_many_messages_at_once_over_tls_are_understood(db, catalogue, secured):
    with encrypted(db, secured) as tls:
        told = b""
        while not told.endswith(READY):
            told += tls.recv(65536)
        for _ in range(500):
            tls.sendall(b"S\0\0\0\4" * 7)
        answered = b""
        while len(answered) < 6 * 3500 and (more := tls.recv(65536)):
            answered += more
    assert answered == READY * 3500


BURSTS = range(120, 150)
"""Numbers of changes in a burst.

One of the bursts ends shortly before the end of a record of TLS, as OpenSSL makes them.
"""
WAIT_ON_THE_SOCKET_ALONE = """
import select, sys, psycopg
heard = []
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    connection.add_notice_handler(heard.append)
    while line := (print(len(heard), flush=True), sys.stdin.readline())[1]:
        while len(heard) < int(line) and select.select([connection.pgconn.socket], [], [], 10)[0]:
            connection.pgconn.consume_input()
            connection.pgconn.notifies()
            connection.pgconn.is_busy()
"""


def test_a_client_that_waits_for_its_socket_alone_gets_the_last_event_of_a_burst_over_tls(
    db, catalogue, secured
):
    catalogue.execute(
        "delete from topology._pico_bucket; insert into topology._pico_bucket "
        "select 'default', n, n, 'copied', 'r1', 'r1' from generate_series(1000, 1999) as n"
    )
    with relay_process(db, **secured) as relay:
        place = relay.conninfo(password="secret", sslmode="require", options="smart_connector=0.1")
        with subprocess.Popen(
            [sys.executable, "-c", WAIT_ON_THE_SOCKET_ALONE, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The system's libpq, which may be an older version.
            env=os.environ | {"PSYCOPG_IMPL": "python"},
        ) as client:
            sent = 0
            assert client.stdout.readline() == "0\n"
            for burst in BURSTS:
                catalogue.execute(
                    "update topology._pico_bucket set current_replicaset_name = 'r' || %s, target_replicaset_name = 'r2' "
                    "where bucket_id_start < 1000 + %s",
                    [1 + burst % 2, burst],
                )
                sent += burst
                client.stdin.write(f"{sent}\n")
                client.stdin.flush()
                assert client.stdout.readline() == f"{sent}\n"
            client.stdin.close()


def test_no_record_of_tls_is_longer_than_any_client_can_take(db, catalogue, secured):
    catalogue.execute(
        "delete from topology._pico_bucket; insert into topology._pico_bucket "
        "select 'default', 2 * n, 2 * n, 'active', 'r1', 'r1' from generate_series(0, 999) as n"
    )
    with encrypted(db, secured) as tls:
        records = [b""]
        while not records[-1].endswith(READY):
            records.append(tls.recv(65536))
            assert records[-1]
    assert max(map(len, records)) <= RECORD < sum(map(len, records))


@pytest.mark.parametrize("user", ["ann", "stranger"])
def test_a_wrong_password_is_refused_and_logged_once(db, catalogue, secured, user):
    with relay_process(db, **secured, limits={"wrong_password_delay": 0.01}) as relay:
        with pytest.raises(ServerUnavailable, match=f'password authentication failed for user "{user}"'):
            TopologyClient(relay.conninfo(user=user, password="wrong", sslmode="require")).connect()
        with TopologyClient(relay.conninfo(password="secret", sslmode="require")):
            pass
        assert relay.stop() == 0
        assert sum("password authentication failed" in line for line in relay.lines) == 1


def salt(relay, user):
    """Return the salt that a relay sends to a client with this user name."""
    with socket.create_connection(("127.0.0.1", relay.port), 30) as sock:
        sock.sendall(packet({**WORD, "user": user}))
        first = b"n,,n=,r=abc"
        body = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
        assert b"SCRAM-SHA-256" in sock.recv(1024)
        sock.sendall(message(b"p", body))
        return sock.recv(1024).split(b",")[1]


def test_salts_of_two_relays_do_not_tell_which_users_there_are(db, catalogue, role, secured):
    reader = role("relay")
    catalogue.execute(sql.SQL("select topology.grant_reader({})").format(reader.name))
    options = {"users": secured["users"]}
    with relay_process(db, **options) as one, relay_process(reader.conninfo, **options) as other:
        for user in ("ann", "stranger"):
            assert salt(one, user) == salt(other, user)


def test_follow_with_a_wrong_password_raises_one_error_with_the_reason(db, catalogue, secured, caplog):
    with relay_process(db, **secured, limits={"wrong_password_delay": 0}) as relay:
        client = TopologyClient(relay.conninfo(password="wrong"))
        thread = threading.Thread(target=client.follow)
        thread.start()
        relay.wait_for("password authentication failed", times=3)
        client.stop()
        thread.join(30)
        client.close()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "password authentication failed" in record.getMessage()


def test_the_relay_needs_no_more_than_to_read(catalogue, role):
    reader = role("relay")
    catalogue.execute(sql.SQL("select topology.grant_reader({})").format(reader.name))
    catalogue.execute("select topology.move_buckets('default', 0, 9, 'copying', 'r2')")
    with relay_process(reader.conninfo) as relay, TopologyClient(relay.conninfo()) as client:
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        assert len(client.receive(30)) == 1
        for state in ("aborting-copy", "active"):
            catalogue.execute("select topology.move_buckets('default', 0, 9, %s)", [state])
        with pytest.raises(ServerUnavailable, match="have arrived"):
            client.receive(30)


def test_tls_is_refused_where_the_relay_has_none(relay):
    with pytest.raises(ServerUnavailable, match="does not support SSL"):
        TopologyClient(relay.conninfo(sslmode="require")).connect()


def test_where_tls_is_required_nobody_connects_without(db, catalogue, secured):
    with relay_process(db, **secured, require_tls=True) as relay:
        for password in ("secret", "wrong"):
            with pytest.raises(ServerUnavailable, match="this server takes encrypted connections only"):
                TopologyClient(relay.conninfo(password=password, sslmode="disable")).connect()
        with TopologyClient(relay.conninfo(password="secret", sslmode="prefer")) as client:
            assert len(client.topology.instances) == 4


def test_tls_cannot_be_required_without_a_certificate(secured):
    with pytest.raises(InvalidArgument, match="--require-tls needs --tls-cert and --tls-key"):
        service.run("", "127.0.0.1:0", users=Path(secured["users"]), require_tls=True)


def test_tls_is_required_on_the_command_line_too(secured):
    args = parsed("topology-relay", "--dsn", "dbname=x", "--users", secured["users"], "--require-tls")
    with pytest.raises(SystemExit, match="--require-tls needs --tls-cert"):
        args.func(args)


def test_more_clients_than_there_may_be_are_told_so(db, catalogue):
    with relay_process(db, limits=LIMITS) as relay:
        clients = [TopologyClient(relay.conninfo()) for _ in range(3)]
        for client in clients:
            client.connect()
        with pytest.raises(ServerUnavailable, match="there are 3 clients already"):
            TopologyClient(relay.conninfo()).connect()
        for client in clients:
            client.close()


def test_asyncpg_signs_in_over_tls(db, catalogue, secured):
    async def ask(port):
        connection = await asyncpg.connect(
            host="127.0.0.1",
            port=port,
            user="ann",
            password="secret",
            database="any",
            ssl=ssl.create_default_context(cafile=secured["tls_cert"]),
            server_settings={"smart_connector": "0.1"},
        )
        try:
            return await connection.fetchval("select 1")
        finally:
            await connection.close()

    with relay_process(db, **secured) as relay:
        assert asyncio.run(ask(relay.port)) == 1


def test_a_client_that_is_silent_after_its_request_for_tls_takes_no_place(db, catalogue, secured):
    with relay_process(db, **secured, limits={"max_clients": 1, "startup_timeout": 2}) as relay:
        with socket.create_connection(("127.0.0.1", relay.port), 30) as silent:
            silent.sendall(struct.pack("!II", 8, 80877103))
            assert silent.recv(1) == b"S"
            while silent.recv(1024):
                pass
        with TopologyClient(relay.conninfo(password="secret", sslmode="require")) as client:
            assert len(client.topology.instances) == 4
