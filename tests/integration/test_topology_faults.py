"""The relay and its clients when something goes wrong: each harms itself alone, and what is told is the truth again."""

from __future__ import annotations

import random
import socket
import struct
import threading
from contextlib import ExitStack, closing, contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_pgchange import schema
from airflow_pgchange.feeds.errors import ServerUnavailable
from airflow_pgchange.topology import TopologyClient
from airflow_pgchange.topology.catalogue import Catalogue
from demo.postgres import free_port
from tests.relay_process import RelayProcess, relay_process
from tests.topology import make_catalogue

HELLO = b"user\0ann\0smart_connector\x000.1\0\0"
PACKET = struct.pack("!II", 8 + len(HELLO), 3 << 16) + HELLO


@pytest.fixture
def catalogue(connect):
    connection = connect()
    make_catalogue(connection)
    return connection


@contextmanager
def raw(relay, *, takes=None):
    """A socket to the relay; ``takes`` bounds what it takes unread."""
    with closing(socket.socket()) as sock:
        if takes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", relay.port))
        yield sock


def everything(sock):
    """What comes until the other side ends."""
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


def until_ready(sock):
    found = b""
    while not found.endswith(b"Z\0\0\0\5I"):
        found += sock.recv(4096)
    return found


def many_buckets(connection, count=30_000):
    connection.execute("delete from topology._pico_bucket")
    connection.execute(
        "insert into topology._pico_bucket select 'default', 2 * n, 2 * n, 'active', 'r1', 'r1' "
        "from generate_series(1, %s) as n",
        [count],
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
def test_what_is_malformed_is_refused_logged_once_and_troubles_nobody_else(db, catalogue, data):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as other:
        with raw(relay) as sock:
            sock.sendall(data)
            assert b"FATAL" in everything(sock)
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        assert len(other.receive(30)) == 1
        relay.stop()
        assert sum("let go" in line and "client 2" in line for line in relay.lines) == 1


@pytest.mark.parametrize("said", [b"", PACKET[:9]])
def test_who_does_not_say_who_it_is_is_let_go(db, catalogue, said):
    with relay_process(db, limits={"startup_seconds": 0.2}) as relay, raw(relay) as sock:
        sock.sendall(said)
        assert b"too slow to say who it is" in everything(sock)


def test_who_takes_changes_too_slowly_is_dropped_with_a_reason_and_holds_up_nobody(db, catalogue):
    many_buckets(catalogue)
    with (
        relay_process(db, limits={"backlog_bytes": 2_000_000}) as relay,
        TopologyClient(relay.conninfo()) as quick,
        raw(relay, takes=4096) as slow,
    ):
        slow.sendall(PACKET)
        until_ready(slow)
        catalogue.execute("update topology._pico_bucket set state = 'copying', target_replicaset_name = 'r2'")
        for part in range(6):
            catalogue.execute(
                "update topology._pico_bucket set state = 'copied' where (bucket_id_start - 2) / 10000 = %s",
                [part],
            )
            heard = 0
            while heard < 5000:
                heard += len(quick.receive(60))
        assert "client 2" in relay.wait_for("bytes of changes wait")
        quick.topology.rebuild()
        assert quick.topology.owner("default", 60_000) == "uuid-r2"
        with TopologyClient(relay.conninfo()) as again:
            assert again.topology.at == quick.topology.at


def test_who_takes_nothing_of_its_snapshot_is_dropped(db, catalogue):
    many_buckets(catalogue)
    with relay_process(db, limits={"stalled_seconds": 0.3}) as relay, raw(relay, takes=4096) as slow:
        slow.sendall(PACKET)
        assert "client 1" in relay.wait_for("it takes nothing")


class CuttingProxy:
    """Stands between a client and the relay, and cuts the connection after so many bytes of the relay's."""

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


def test_a_connection_to_the_catalogue_that_is_lost_loses_nothing(db, catalogue):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        killed = catalogue.execute(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        ).fetchone()
        assert killed[0] >= 1
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        relay.wait_for("back, in the same term")
        (event,) = client.receive(30)
        assert event.current_state == "Offline"


def test_who_would_miss_events_that_were_trimmed_before_the_relay_read_them_begins_anew(db, catalogue):
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        with catalogue.transaction():
            catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
            catalogue.execute("update topology.log set written_at = now() - interval '1 second'")
            (trimmed,) = catalogue.execute("select topology.trim_log('0')").fetchone()
        assert trimmed is not None
        with pytest.raises(ServerUnavailable, match="were trimmed before the relay had read them"):
            client.receive(30)
        client.connect()
        assert client.topology.instances["uuid-r1-i2"].state == "Offline"
        catalogue.execute("select topology.set_state('r1-i2', 'Online')")
        (event,) = client.receive(30)
        assert event.current_state == "Online"


def test_there_is_room_for_as_many_clients_as_there_may_be(db, catalogue):
    with relay_process(db, files=[40, 400], limits={"clients": 200}) as relay, ExitStack() as opened:
        for _ in range(60):
            sock = opened.enter_context(raw(relay))
            sock.sendall(PACKET)
            until_ready(sock)


def test_more_clients_than_files_that_may_be_open_are_an_error_that_says_so(db):
    relay = RelayProcess(db, free_port(), {"files": [40, 400], "limits": {"clients": 301}})
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


def test_a_relay_waits_for_a_catalogue_that_is_not_there_yet(own_cluster):
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        schema.install(connection)
        make_catalogue(connection)
    own_cluster.stop()
    relay = RelayProcess(own_cluster.conninfo(), free_port(), {"limits": {"startup_seconds": 0.5}})
    try:
        relay.wait_for("the catalogue is lost")
        with pytest.raises(ServerUnavailable, match="the catalogue cannot be reached now"):
            TopologyClient(relay.conninfo()).connect()
        own_cluster.start()
        relay.wait_for("in term")
        with TopologyClient(relay.conninfo()) as client:
            assert len(client.topology.instances) == 4
    finally:
        relay.kill()


def test_a_database_without_a_catalogue_is_an_error_that_says_so(bare_db):
    relay = RelayProcess(bare_db, free_port(), {})
    assert relay.stop(0) != 0
    assert "airflow pgchange install" in relay.wait_for("SchemaMissing")


def test_a_role_that_may_not_read_the_catalogue_is_an_error_that_says_what_it_needs(catalogue, role):
    relay = RelayProcess(role("nobody").conninfo, free_port(), {})
    assert relay.stop(0) != 0
    assert "topology.grant_reader('<role>')" in relay.wait_for("PermissionDenied")


async def test_a_catalogue_that_does_not_answer_counts_as_lost(db, catalogue, monkeypatch):
    monkeypatch.setattr("airflow_pgchange.topology.catalogue.PATIENCE", 0.5)
    asked = Catalogue(db)
    await asked.connect()
    try:
        with catalogue.transaction():
            catalogue.execute("lock table topology.log")
            with pytest.raises(ServerUnavailable, match=r"did not answer within 0\.5 s"):
                await asked.now()
    finally:
        await asked.close()


def test_an_address_that_is_taken_is_an_error_that_says_so(db, catalogue):
    with relay_process(db) as first:
        second = RelayProcess(db, first.port, {})
        assert second.stop(0) != 0
        assert f"127.0.0.1:{first.port}" in second.wait_for("InvalidArgument: nothing can listen on")


def test_a_catalogue_that_restarted_begins_a_new_term_with_a_new_snapshot(own_database, own_cluster):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    with relay_process(own_database) as relay, TopologyClient(relay.conninfo()) as client:
        own_cluster.restart()
        with pytest.raises(ServerUnavailable, match="restarted or failed over"):
            client.receive(30)
        client.connect()
        assert (client.topology.at.term, len(client.topology.instances)) == (2, 4)


def test_a_server_that_was_replaced_behind_a_connection_that_lives_on_is_noticed(db, catalogue):
    """As a pooler's does: that the server is another one only its term says."""
    with relay_process(db) as relay, TopologyClient(relay.conninfo()) as client:
        catalogue.execute("update topology.term set started_at = started_at - interval '1 hour'")
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        with pytest.raises(ServerUnavailable, match="restarted or failed over"):
            client.receive(30)
        client.connect()
        assert client.topology.at.term == 2
        assert client.topology.instances["uuid-r1-i2"].state == "Offline"


def test_a_new_primary_that_never_got_the_term_before_it_begins_one_that_is_told_apart(
    own_database, own_cluster
):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    standby = own_cluster.standby()
    servers = make_conninfo(
        own_database, host="127.0.0.1,127.0.0.1", port=f"{own_cluster.port},{standby.port}"
    )
    try:
        standby.wait_for_replay(own_cluster)
        standby.stop()
        own_cluster.restart()
        with relay_process(servers) as relay, TopologyClient(relay.conninfo()) as client:
            with psycopg.connect(own_database, autocommit=True) as connection:
                connection.execute("select topology.set_state('r1-i2', 'Offline')")
            assert client.receive(30)[0].raft.term == 2
            own_cluster.kill()
            standby.start()
            standby.promote()
            with pytest.raises(ServerUnavailable, match="restarted or failed over"):
                client.receive(60)
            client.connect()
            assert client.topology.at.term == 2
            assert client.topology.instances["uuid-r1-i2"].state == "Online"
    finally:
        standby.remove()


def test_a_catalogue_that_failed_over_is_followed_to_its_new_primary(own_database, own_cluster):
    with psycopg.connect(own_database, autocommit=True) as connection:
        make_catalogue(connection)
    standby = own_cluster.standby()
    servers = make_conninfo(
        own_database, host="127.0.0.1,127.0.0.1", port=f"{own_cluster.port},{standby.port}"
    )
    try:
        with relay_process(servers) as relay, TopologyClient(relay.conninfo()) as client:
            standby.wait_for_replay(own_cluster)
            own_cluster.kill()
            standby.promote()
            with pytest.raises(ServerUnavailable, match="restarted or failed over"):
                client.receive(60)
            with psycopg.connect(standby.conninfo(), autocommit=True) as connection:
                connection.execute("select topology.set_master('r1', 'r1-i2')")
            client.connect()
            assert client.topology.at.term == 2
            assert client.topology.master("default", 1).uuid == "uuid-r1-i2"
    finally:
        standby.remove()
