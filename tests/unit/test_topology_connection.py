"""The limits of the cost of a client for the relay, without a network."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import struct
import subprocess
import weakref
from asyncio.sslproto import SSLProtocol
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from airflow_pgchange.errors import ClientRefused
from airflow_pgchange.topology import connection
from airflow_pgchange.topology.auth import Users, Verifier
from airflow_pgchange.topology.catalogue import Catalogue, Term
from airflow_pgchange.topology.connection import Connection, Limits
from airflow_pgchange.topology.encryption import Encryption, load_encryption
from airflow_pgchange.topology.frames import SSL
from airflow_pgchange.topology.protocol import Session
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.relay import Relay
from airflow_pgchange.topology.replies import READY, message


class Socket:
    """Records its calls."""

    def __init__(self):
        self.options = {}

    def setsockopt(self, level, name, value):
        self.options[level, name] = value


class Transport:
    """A transport that accepts writes while the other side reads.

    Like asyncio's transport, it reports when it is full.
    """

    def __init__(self):
        self.protocol = None
        self.written = []
        self.reading = True
        self.closed = False
        self.aborted = asyncio.Event()
        self.full = False
        self.socket = Socket()

    def get_extra_info(self, name):
        return self.socket if name == "socket" else ("10.0.0.1", 5)

    def set_write_buffer_limits(self, high):
        pass

    def write(self, data):
        self.written.append(data)
        if self.full:
            self.protocol.pause_writing()

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted.set()


class Keeper:
    def arrived(self, connection):
        pass

    def gone(self, connection):
        pass


def startup(**parameters):
    pairs = "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode() + b"\0"
    return struct.pack("!II", 8 + len(pairs), 3 << 16) + pairs


@pytest.fixture
async def transport():
    """A transport of a client that has its snapshot, and for which at most 100 bytes may wait."""
    made = Transport()
    made.protocol = Connection(1, Session(1, None), Keeper(), Limits(backlog_bytes=100), None)
    made.protocol.connection_made(made)
    made.protocol.data_received(startup(user="ann", smart_connector="0.1"))
    made.protocol.welcome([b"snapshot"], Raft(1, 1), None)
    yield made
    made.protocol.connection_lost(None)


async def test_a_client_that_reads_as_fast_as_changes_come_is_never_too_slow(transport):
    transport.full = True
    transport.protocol.offer([b"x" * 30] * 2)
    for _ in range(10):
        transport.protocol.offer([b"x" * 30] * 2)
        assert not transport.closed
        # Two of the three waiting connections are accepted.
        transport.protocol.resume_writing()
        transport.protocol.resume_writing()
    assert transport.written.count(b"x" * 30) == 21


async def test_a_slow_client_gets_no_more_until_it_has_read_some(transport):
    transport.full = True
    transport.protocol.offer([b"x" * 30] * 4)
    assert transport.protocol.takes
    transport.protocol.offer([b"x" * 30])
    assert not transport.protocol.takes
    transport.protocol.resume_writing()
    assert transport.protocol.takes
    assert not transport.closed


async def test_a_client_is_not_asked_for_more_while_it_takes_no_answers(transport):
    transport.full = True
    transport.protocol.data_received(b"S\0\0\0\4")
    assert not transport.reading
    transport.full = False
    transport.protocol.resume_writing()
    assert transport.reading


async def test_a_peer_that_vanished_without_a_word_is_looked_for(transport):
    known = transport.socket.options
    assert known[socket.SOL_SOCKET, socket.SO_KEEPALIVE] == 1
    assert known[socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT] == 60_000


async def test_a_client_that_is_dismissed_before_its_snapshot_gets_none(transport):
    transport.protocol.refuse(ClientRefused("57P01", "no"))
    transport.protocol.welcome([b"another"], Raft(1, 2), None)
    assert b"another" not in transport.written


async def test_a_dismissed_client_that_does_not_read_to_the_end_is_cut_off(transport, monkeypatch):
    monkeypatch.setattr(connection, "GRACE", 0.05)
    transport.full = True
    transport.protocol.refuse(ClientRefused("57P01", "no"))
    transport.protocol.resume_writing()
    await asyncio.wait_for(transport.aborted.wait(), 30)


async def test_a_client_for_whom_there_is_no_room_does_not_keep_its_socket_for_long(monkeypatch):
    monkeypatch.setattr(connection, "REFUSAL", 0)
    made = Transport()
    session = Session(1, None, refusal=ClientRefused("53300", "there are 1 clients already"))
    made.protocol = Connection(1, session, Keeper(), Limits(), None)
    made.protocol.connection_made(made)
    async with asyncio.timeout(5):
        while not made.closed:
            await asyncio.sleep(0)
    made.protocol.connection_lost(None)


async def test_a_client_that_the_catalogue_has_to_be_reached_for_is_told_so_when_its_time_is_up():
    made = Transport()
    made.protocol = Connection(1, Session(1, Users({})), Keeper(), Limits(startup_timeout=0), None)
    made.protocol.connection_made(made)
    made.protocol.data_received(startup(user="ann", smart_connector="0.1"))
    async with asyncio.timeout(5):
        while not made.closed:
            await asyncio.sleep(0)
    assert b"the catalogue cannot be reached now" in made.written[-1]
    made.protocol.connection_lost(None)


def guess(transport):
    """Answer the relay with a wrong password."""
    first = b"n,,n=,r=abc"
    body = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
    transport.protocol.data_received(startup(user="ann", smart_connector="0.1") + message(b"p", body))
    nonce = transport.written[-1].split(b"r=")[1].split(b",")[0]
    final = b"c=biws,r=" + nonce + b",p=" + b"A" * 43 + b"="
    transport.protocol.data_received(message(b"p", final))


async def test_a_wrong_password_is_answered_after_a_delay_in_which_nothing_else_is_heard():
    made = Transport()
    users = Users({"ann": Verifier(b"salt", b"x" * 32, b"y" * 32, 4096)})
    users.secret = b"secret"
    limits = Limits(wrong_password_delay=0.05)
    made.protocol = Connection(1, Session(1, users), Keeper(), limits, None)
    made.protocol.connection_made(made)
    began = asyncio.get_running_loop().time()
    guess(made)
    heard = len(made.written)
    assert not made.reading
    made.protocol.data_received(b"!")
    assert len(made.written) == heard
    async with asyncio.timeout(5):
        while not made.closed:
            await asyncio.sleep(0.001)
    assert asyncio.get_running_loop().time() - began >= 0.05
    assert b"password authentication failed" in made.written[-1]
    made.protocol.connection_lost(None)


async def test_a_client_that_sends_much_at_once_takes_turns_with_the_others(monkeypatch):
    heard, much = [], b"S\0\0\0\4" * 60_000
    receive = Session.receive

    def listen(session, data):
        heard.append(len(data))
        return receive(session, data)

    loop = asyncio.get_running_loop()
    made = Connection(1, Session(1, None), Keeper(), Limits(), None)
    server = await loop.create_server(lambda: made, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(startup(user="ann", smart_connector="0.1"))
        await reader.readuntil(b"K\0\0\0\x0c")
        made.welcome([], Raft(1, 1), None)
        monkeypatch.setattr(Session, "receive", listen)
        writer.write(much)
        await reader.readexactly(8 + 6 * 60_001)
        writer.close()
    assert sum(heard) == len(much)
    assert max(heard) <= connection.MOUTHFUL


async def test_tls_is_not_begun_with_who_is_gone_already(monkeypatch):
    """Otherwise asyncio would wait for such a connection for ever, and keep its memory."""
    begun = []

    async def begin(*arguments, **options):
        begun.append(arguments)

    monkeypatch.setattr(asyncio.get_running_loop(), "start_tls", begin)
    made, encryption = Transport(), Encryption(ssl.create_default_context(), None)
    made.protocol = Connection(1, Session(1, None, encrypts=True), Keeper(), Limits(), encryption)
    made.protocol.connection_made(made)
    made.protocol.data_received(struct.pack("!II", 8, SSL))
    made.protocol.connection_lost(ConnectionResetError())
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert begun == []


def protocols_of_tls() -> set[int]:
    """Return the ids of all TLS protocol objects in this process, also those of other tests.

    The objects themselves are not kept, so that they can be freed. isinstance() fails for some objects, so compare
    types.
    """
    return {id(one) for one in gc.get_objects() if type(one) is SSLProtocol}


async def test_of_who_ends_in_the_middle_of_tls_nothing_is_left_though_nobody_collects_garbage(tmp_path):
    name = ["-subj", "/CN=localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "cert"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name]
    subprocess.run(make, check=True, capture_output=True)
    encryption, gone = load_encryption(tmp_path / "cert", tmp_path / "key"), asyncio.Event()
    session, keeper = Session(1, None, encrypts=True), Keeper()
    keeper.gone = lambda connection: gone.set()
    made = Connection(1, session, keeper, Limits(), encryption)
    server = await asyncio.get_running_loop().create_server(lambda: made, "127.0.0.1", 0)
    gc.collect()
    gc.disable()
    others = protocols_of_tls()
    try:
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(struct.pack("!II", 8, SSL))
            assert await reader.readexactly(1) == b"S"
            writer.close()
            await gone.wait()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        # The event loop still has a callback to run.
        async with asyncio.timeout(30):
            while not protocols_of_tls() <= others:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_the_replies_to_one_read_are_one_write(transport):
    transport.protocol.data_received(b"S\0\0\0\4" * 3)
    assert transport.written[-1] == READY * 3


async def test_a_refused_client_gets_the_replies_to_its_earlier_messages(transport):
    transport.protocol.data_received(b"S\0\0\0\4" * 3 + b"!")
    assert transport.written[-2] == READY * 3
    assert b"FATAL" in transport.written[-1]


async def test_a_client_that_left_while_the_catalogue_was_away_leaves_nothing():
    relay = Relay(Catalogue(""), None)
    client = Connection(1, Session(1, None), relay, Limits(), None)
    relay.arrived(client)
    relay.gone(client)
    left = weakref.ref(client)
    del client
    gc.collect()
    assert left() is None


class Deaf(Catalogue):
    """A task that, when it is cancelled, returns a result once, like a wait that ends at that moment."""

    def __init__(self):
        self.asked = asyncio.Event()

    async def connect(self):
        return Term(1, 1, 1, datetime.now(UTC), 1, 1)

    async def now(self):
        return Raft(1, 1)

    async def events(self, after):
        if not self.asked.is_set():
            self.asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return []

    async def close(self):
        pass


async def test_a_relay_that_is_to_stop_stops_though_its_catalogue_answers_at_that_moment():
    catalogue, stop = Deaf(), asyncio.Event()
    serving = asyncio.create_task(Relay(catalogue, None).serve("127.0.0.1", 0, stop))
    await catalogue.asked.wait()
    stop.set()
    await asyncio.wait_for(serving, 30)


async def test_a_client_cannot_write_lines_of_its_own_into_the_log(caplog):
    made = Transport()
    made.protocol = Connection(1, Session(1, None), Keeper(), Limits(), None)
    made.protocol.connection_made(made)
    with caplog.at_level(logging.INFO):
        made.protocol.data_received(startup(user="ann\nERROR", smart_connector="9\nERROR all is lost\x1b[2J"))
    made.protocol.connection_lost(None)
    (record,) = [record for record in caplog.records if "disconnected" in record.getMessage()]
    assert record.getMessage().isprintable()
    assert "ERROR all is lost" in record.getMessage()
