"""Faults of the relay and its clients: each fault harms only its cause, and afterwards clients have the correct state."""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
from contextlib import ExitStack, closing, contextmanager

import pytest

from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.topology import TopologyClient
from airflow_pgchange.topology.frames import LONGEST_MESSAGE
from demo.postgres import free_port
from tests.relay_process import RelayProcess, relay_process

HELLO = b"user\0ann\0smart_connector\x000.1\0\0"
PACKET = struct.pack("!II", 8 + len(HELLO), 3 << 16) + HELLO


@contextmanager
def raw(relay, *, takes=None):
    """A socket to the relay. ``takes`` limits the bytes that it receives without reading them."""
    with closing(socket.socket()) as sock:
        if takes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", relay.port))
        yield sock


def everything(sock):
    """Return all bytes until the other side closes the connection."""
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


def until_ready(sock):
    found = b""
    while not found.endswith(b"Z\0\0\0\5I"):
        found += sock.recv(4096)
    return found


LONG = "-" * 1000


def many_buckets(connection):
    """Change many buckets with long owners' names: some megabytes of events, more than the buffers between relay and
    client hold."""
    connection.execute("delete from topology._pico_bucket")
    for name in ("l1", "l2"):
        connection.execute("select topology.add_replicaset(%s, uuid => %s)", [name, name + LONG])
    connection.execute(
        "insert into topology._pico_bucket select 'default', 2 * n, 2 * n, 'active', 'l1', 'l1' "
        "from generate_series(1, 6000) as n"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\1",
        b"\xff" * 64,
        PACKET[:-3] + b"\0\0\0",
        PACKET + b"Q\xff\xff\xff\xff",
        PACKET + b"!\0\0\0\4",
        random.Random(1).randbytes(2000).replace(b"\0", b"\1"),
    ],
)
def test_malformed_bytes_are_refused_logged_once_and_harm_no_other_client(db, catalogue, data):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as other:
        with raw(relay) as sock:
            sock.sendall(data)
            assert b"FATAL" in everything(sock)
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        assert len(other.receive(30)) == 1
        relay.stop()
        assert sum("disconnected" in line and "client 2" in line for line in relay.lines) == 1


def test_a_query_of_many_blanks_holds_up_nobody(db, catalogue):
    query = b"select 1" + b" " * (LONGEST_MESSAGE - 14) + b"x\0"
    blanks = b"Q" + struct.pack("!I", 4 + len(query)) + query
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as other, raw(relay) as sock:
        sock.sendall(PACKET)
        until_ready(sock)
        sock.sendall(b"Q\0\0\0\5\0" + 4 * blanks)
        assert sock.recv(1) == b"I"
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        assert len(other.receive(30)) == 1


@pytest.mark.parametrize("said", [b"", PACKET[:9]])
def test_a_client_that_does_not_sign_in_is_disconnected(db, catalogue, said):
    with relay_process(db, limits={"startup_timeout": 0.2}) as relay, raw(relay) as sock:
        sock.sendall(said)
        assert b"too slow to say who it is" in everything(sock)


def test_a_slow_client_delays_no_other_and_gets_all_changes(db, catalogue):
    with (
        relay_process(db, limits={"backlog_bytes": 100_000}) as relay,
        TopologyClient(relay.conninfo()) as quick,
        raw(relay, takes=4096) as slow,
    ):
        slow.sendall(PACKET)
        until_ready(slow)
        many_buckets(catalogue)
        catalogue.execute("update topology._pico_bucket set state = 'copying', target_replicaset_name = 'l2'")
        for part in range(6):
            catalogue.execute(
                "update topology._pico_bucket set state = 'copied' where (bucket_id_start - 2) / 2000 = %s",
                [part],
            )
            heard = 0
            while heard < 1000:
                heard += len(quick.receive(60))
        quick.topology.rebuild()
        assert quick.topology.owner("default", 12_000) == "l2" + LONG
        told, last = bytearray(), re.compile(rb'"start": ?12000')
        # Megabytes come in small pieces, so search only the end of the buffer again.
        while not last.search(told, max(0, len(told) - 65536 - 20)):
            piece = slow.recv(65536)
            assert piece
            told += piece
        starts = [int(start) for start in re.findall(rb'"start": ?(\d+)', told)]
        assert starts == list(range(2, 12_001, 2))


def test_a_client_that_does_not_read_its_snapshot_is_disconnected(db, catalogue):
    many_buckets(catalogue)
    with relay_process(db, limits={"stalled_timeout": 0.3}) as relay, raw(relay, takes=4096) as slow:
        slow.sendall(PACKET)
        assert "client 1" in relay.wait_for("it takes nothing")


class CuttingProxy:
    """A proxy between a client and the relay that cuts the connection after this number of bytes from the relay."""

    def __init__(self, port, bytes_until_cut):
        self.cut = False
        self._left = bytes_until_cut
        self._relay = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        client, _ = self._listener.accept()
        relay = socket.create_connection(("127.0.0.1", self._relay))
        up = threading.Thread(target=self._up, args=[client, relay], daemon=True)
        up.start()
        while self._left > 0 and (data := relay.recv(min(self._left, 65536))):
            client.sendall(data)
            self._left -= len(data)
        self.cut = self._left == 0
        for sock in (client, relay):
            sock.shutdown(socket.SHUT_RDWR)
        up.join(30)
        for sock in (client, relay, self._listener):
            sock.close()

    @staticmethod
    def _up(client, relay):
        while data := client.recv(65536):
            relay.sendall(data)

    def join(self):
        self._thread.join(30)


def test_a_client_that_is_cut_off_does_not_take_half_a_snapshot_for_a_whole_one(db, catalogue):
    many_buckets(catalogue)
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        before = client.topology.at, len(client.topology.buckets("default"))
        proxy = CuttingProxy(relay.port, 1_000_000)
        cut = TopologyClient(relay.conninfo(port=proxy.port, sslmode="disable"), client.topology)
        with pytest.raises(ServerUnavailable):
            cut.connect()
        proxy.join()
        assert proxy.cut
        assert (client.topology.at, len(client.topology.buckets("default"))) == before


def test_there_is_room_for_as_many_clients_as_there_may_be(db, catalogue):
    with relay_process(db, files=[40, 400], limits={"max_clients": 200}) as relay, ExitStack() as opened:
        for _ in range(60):
            sock = opened.enter_context(raw(relay))
            sock.sendall(PACKET)
            until_ready(sock)


def test_more_clients_than_files_that_may_be_open_are_an_error_that_says_so(db):
    relay = RelayProcess(db, free_port(), {"files": [40, 400], "limits": {"max_clients": 301}})
    assert relay.stop(0) != 0
    assert "InvalidArgument" in relay.wait_for("give --max-clients 300")


def test_a_relay_that_is_killed_is_found_again_by_whoever_follows(db, catalogue):
    snapshots = threading.Semaphore(0)

    def hear(events):
        if not events:
            snapshots.release()

    with relay_process(db) as first:
        port = first.port
        client = TopologyClient(first.conninfo())
        thread = threading.Thread(target=client.follow, args=[hear])
        thread.start()
        assert snapshots.acquire(timeout=30)
        first.kill()
    second = RelayProcess(db, port, {})
    try:
        assert snapshots.acquire(timeout=60)
        assert client.topology.owner("default", 1) == "uuid-r1"
    finally:
        client.stop()
        thread.join(30)
        client.close()
        second.kill()


def test_an_address_that_is_taken_is_an_error_that_says_so(db, catalogue):
    with relay_process(db) as first:
        second = RelayProcess(db, first.port, {})
        assert second.stop(0) != 0
        assert f"127.0.0.1:{first.port}" in second.wait_for("InvalidArgument: nothing can listen on")
