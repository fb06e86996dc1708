"""The relay as a process, and every kind of client: psql, psycopg, asyncpg, pg8000, and ours."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import pg8000.native
import psycopg
import pytest

from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.topology import Topology, TopologyClient
from tests.proxy import proxy_before
from tests.relay_process import relay_process
from tests.silence import impatient
from tests.topology import ORDER, kinds, notices, psql

OPEN = Path("/proc/self/fd")


@pytest.mark.parametrize(
    ("query", "environment"),
    [
        ("?options=smart_connector%3D0.1", {}),
        ("?options=-c%20smart_connector%3D0.1", {}),
        ("?options=picodata_catalog_cdc%3D1", {}),
        ("", {"PGOPTIONS": "-c smart_connector=0.1"}),
    ],
)
def test_psql_shows_the_snapshot_and_answers(relay, query, environment):
    told = psql(f"postgres://ann@localhost:{relay.port}{query}", "select 1", "", **environment)
    assert (told.returncode, kinds(notices(told.stderr))) == (0, ORDER)
    assert "(1 row)" in told.stdout


def test_psql_shows_what_happened_with_its_next_query(relay, catalogue):
    url = f"postgres://ann@localhost:{relay.port}?options=smart_connector%3D0.1"
    process = subprocess.Popen(
        ["psql", "-X", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for _ in ORDER:
        assert process.stdout.readline().startswith("NOTICE:")
    catalogue.execute("select topology.set_master('r1', 'r1-i2')")
    said = ""
    while "r1-i2" not in said:
        said = ""
        process.stdin.write("select 1;\n\\echo answered\n")
        process.stdin.flush()
        while not said.endswith("answered\n"):
            said += process.stdout.readline()
    process.communicate("\\q\n", timeout=60)
    assert notices(said)[0]["current_master_uuid"] == "uuid-r1-i2"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("", "this server sends changes of a cluster's topology"),
        ("?options=smart_connector%3D0.7", "use one of: smart_connector = 0.1, picodata_catalog_cdc = 1"),
    ],
)
def test_an_ordinary_client_and_an_unknown_version_are_told_what_to_do(relay, query, reason):
    told = psql(f"postgres://ann@localhost:{relay.port}{query}", "select 1")
    assert told.returncode == 2
    assert reason in told.stderr


def test_psycopg_hears_what_happens_while_it_is_idle(relay, catalogue):
    heard = []
    with psycopg.connect(relay.conninfo(options="smart_connector=0.1"), autocommit=True) as connection:
        connection.add_notice_handler(lambda notice: heard.append(json.loads(notice.message_primary)))
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        while not heard:
            assert connection.execute("select 1").fetchone() == (1,)
    assert heard[0]["current_state"] == "Offline"


async def test_asyncpg_hears_what_happens(relay, catalogue):
    heard = asyncio.Queue()
    connection = await asyncpg.connect(
        host="127.0.0.1",
        port=relay.port,
        user="ann",
        database="any",
        server_settings={"smart_connector": "0.1"},
    )
    connection.add_log_listener(lambda _, message: heard.put_nowait(json.loads(message.message)))
    assert await connection.fetchval("select 1") == 1
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    event = await asyncio.wait_for(heard.get(), 30)
    assert event["current_state"] == "Offline"
    await connection.close()


async def test_a_pool_of_asyncpg_gives_connections_back(relay, catalogue):
    heard = asyncio.Queue()
    async with asyncpg.create_pool(
        host="127.0.0.1",
        port=relay.port,
        user="ann",
        database="any",
        server_settings={"smart_connector": "0.1"},
        min_size=1,
        max_size=1,
    ) as pool:
        for _ in range(2):
            async with pool.acquire() as connection:
                backend = connection.get_server_pid()
                assert await connection.fetchval("select 1") == 1
        async with pool.acquire() as connection:
            assert connection.get_server_pid() == backend
            connection.add_log_listener(lambda _, message: heard.put_nowait(json.loads(message.message)))
            catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
            assert (await asyncio.wait_for(heard.get(), 30))["current_state"] == "Offline"


NO_OPS = [
    "select pg_advisory_unlock_all()",
    "close all",
    "unlisten *",
    "reset all",
    "reset role",
    "reset session authorization",
    "discard all",
    "discard temp",
    "discard temporary",
    "discard plans",
    "discard sequences",
    "deallocate all",
    "set session authorization default",
    "set session characteristics as transaction read only",
    "set application_name to 'me'",
    "set session extra_float_digits = 3",
    "set client_encoding to 'utf-8'",
    "set role none",
    "rollback",
    "abort",
    "rollback work",
    "",
]


@pytest.mark.parametrize("cursor", [psycopg.ClientCursor, psycopg.RawCursor], ids=["simple", "extended"])
def test_statements_without_effect_are_answered_as_postgresql_does(relay, catalogue, cursor):
    with psycopg.connect(relay.conninfo(options="smart_connector=0.1"), autocommit=True) as connection:
        asked, server = cursor(connection), cursor(catalogue)
        for statement in NO_OPS:
            seen = []
            for one in (asked, server):
                # If a parameter's format is not the default, psycopg uses the extended query protocol.
                one.execute(statement, binary=cursor is psycopg.RawCursor or None)
                columns = [(c.name, c.type_code) for c in one.description or ()]
                seen.append((one.statusmessage, columns, one.fetchall() if columns else []))
            assert seen[0] == seen[1], statement


def test_pg8000_hears_the_snapshot_and_what_happens(relay, catalogue):
    connection = pg8000.native.Connection(
        "ann",
        host="127.0.0.1",
        port=relay.port,
        database="any",
        startup_params={"picodata_catalog_cdc": "1"},
    )
    events = [json.loads(notice[b"M"]) for notice in connection.notices]
    assert kinds(events) == ORDER
    connection.notices.clear()
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    while not connection.notices:
        assert connection.run("select 1") == [[1]]
    assert json.loads(connection.notices[0][b"M"])["current_state"] == "Offline"
    connection.close()


def test_our_client_has_the_snapshot_when_it_is_connected_and_then_what_happens(relay, catalogue):
    with TopologyClient(relay.conninfo()) as client:
        assert client.topology.master("default", 42).address == "127.0.0.1:11"
        assert [one.uuid for one in client.topology.replicas("default", 42)] == ["uuid-r1-i2"]
        catalogue.execute("select topology.set_master('r1', 'r1-i2')")
        (event,) = client.receive(30)
        assert event.current_master_uuid == "uuid-r1-i2"
        assert client.topology.master("default", 42).uuid == "uuid-r1-i2"


def test_who_only_looks_whether_something_has_happened_hears_of_it(relay, catalogue):
    with TopologyClient(relay.conninfo()) as client:
        assert client.receive(timeout=0) == []
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        until = time.monotonic() + 30
        while not (news := client.receive(timeout=0)) and time.monotonic() < until:
            time.sleep(0.01)
        assert [event.current_state for event in news] == ["Offline"]


def test_gathered_changes_of_buckets_show_when_they_are_due(relay, catalogue):
    topology = Topology(gather_interval=0.2)
    with TopologyClient(relay.conninfo(), topology) as client:
        catalogue.execute("select topology.move_buckets('default', 0, 9, 'copying', 'r2')")
        catalogue.execute("select topology.move_buckets('default', 0, 9, 'copied')")
        client.receive(30)
        assert topology.owner("default", 5) == "uuid-r1"
        while topology.due_in() is not None:
            client.receive(topology.due_in())
        assert topology.owner("default", 5) == "uuid-r2"


def test_a_burst_ends_with_the_map_of_the_catalogue_for_everybody(db, catalogue):
    catalogue.execute(
        "delete from topology._pico_bucket; insert into topology._pico_bucket "
        "select 'default', n, n, 'active', 'r1', 'r1' from generate_series(0, 4499) as n"
    )
    with relay_process(db, most_events=500) as relay, ExitStack() as opened:
        clients = [
            opened.enter_context(TopologyClient(relay.conninfo(), Topology(gather_count=200)))
            for _ in range(2)
        ]
        catalogue.execute("update topology._pico_bucket set state = 'copying', target_replicaset_name = 'r2'")
        catalogue.execute("update topology._pico_bucket set state = 'copied' where bucket_id_start % 3 > 0")
        for client in clients:
            heard = 0
            while heard < 3000:
                heard += len(client.receive(30))
            client.topology.rebuild()
            owners = [client.topology.owner("default", number) for number in range(4500)]
            assert owners == ["uuid-r2" if number % 3 else "uuid-r1" for number in range(4500)]


def test_who_came_while_ranges_were_on_their_way_is_refreshed_when_they_have_arrived(relay, catalogue):
    catalogue.execute("select topology.move_buckets('default', 0, 9, 'copying', 'r2')")
    with TopologyClient(relay.conninfo()) as client:
        assert client.topology.owner("default", 5) is None
        for state in ("aborting-copy", "active"):
            catalogue.execute("select topology.move_buckets('default', 0, 9, %s)", [state])
        with pytest.raises(ServerUnavailable, match="ranges of buckets that were on their way have arrived"):
            client.receive(30)
        client.connect()
        assert client.topology.owner("default", 5) == "uuid-r1"


def test_a_client_that_has_received_all_that_its_snapshot_lacked_is_not_refreshed(relay, catalogue):
    catalogue.execute("select topology.move_buckets('default', 0, 9, 'copying', 'r2')")
    with TopologyClient(relay.conninfo()) as told, TopologyClient(relay.conninfo()) as other:
        catalogue.execute("select topology.move_buckets('default', 20, 29, 'copying', 'r2')")
        other.connect()
        for first, state in ((0, "copied"), (0, "active"), (20, "aborting-copy"), (20, "active")):
            catalogue.execute(
                "select topology.move_buckets('default', %s, %s, %s)", [first, first + 9, state]
            )
        assert len(other.receive(30)) == 1
        with pytest.raises(ServerUnavailable, match="have arrived"):
            other.receive(30)
        catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
        heard = []
        while len(heard) < 2:
            heard += told.receive(30)
        assert told.topology.owner("default", 25) == "uuid-r1"


def test_of_several_ranges_that_a_snapshot_lacks_one_that_takes_long_does_not_keep_the_others_back(
    db, catalogue
):
    for first in (0, 20):
        catalogue.execute(
            "select topology.move_buckets('default', %s, %s, 'copying', 'r2')", [first, first + 9]
        )
    with (
        relay_process(db, limits={"refresh_interval": 0}) as relay,
        TopologyClient(relay.conninfo()) as client,
    ):
        for state in ("aborting-copy", "active"):
            catalogue.execute("select topology.move_buckets('default', 0, 9, %s)", [state])
        with pytest.raises(ServerUnavailable, match="have arrived"):
            client.receive(30)
        client.connect()
        assert [client.topology.owner("default", number) for number in (5, 25)] == ["uuid-r1", None]


def test_follow_connects_again_and_stops_when_told(relay, catalogue):
    catalogue.execute("select topology.move_buckets('default', 0, 9, 'copying', 'r2')")
    told, snapshots = [], threading.Semaphore(0)

    def hear(events):
        told.append(events)
        if not events:
            snapshots.release()

    client = TopologyClient(relay.conninfo())
    thread = threading.Thread(target=client.follow, args=[hear])
    thread.start()
    assert snapshots.acquire(timeout=30)
    catalogue.execute("select topology.move_buckets('default', 0, 9, 'aborting-copy')")
    catalogue.execute("select topology.move_buckets('default', 0, 9, 'active')")
    assert snapshots.acquire(timeout=30)
    client.stop()
    thread.join(30)
    assert not thread.is_alive()
    client.close()
    assert told == [[], []]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_relay_tells_its_clients_and_ends_cleanly(relay, number):
    with TopologyClient(relay.conninfo()) as client:
        assert relay.stop(number) == 0
        with pytest.raises(ServerUnavailable, match="the relay is stopping"):
            client.receive(30)
    assert relay.lines[-1].endswith("stopped")


def test_a_server_that_is_silent_does_not_keep_a_client_from_the_next(relay, catalogue):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = f"{silent.getsockname()[1]},{relay.port}"
        place = relay.conninfo(host="127.0.0.1,127.0.0.1", port=ports, connect_timeout=3)
        with TopologyClient(place) as client:
            assert len(client.topology.instances) == 4
        silent.settimeout(30)
        silent.accept()[0].close()


def test_a_client_whose_relay_falls_silent_takes_another_connection(relay, catalogue):
    snapshots = threading.Semaphore(0)
    with proxy_before(relay.port) as proxy:
        client = TopologyClient(impatient(relay.conninfo(port=proxy.port)))
        thread = threading.Thread(
            target=client.follow, args=[lambda news: None if news else snapshots.release()]
        )
        thread.start()
        assert snapshots.acquire(timeout=30)
        masters = [each.master for each in client.topology.replicasets.values()]
        proxy.fall_silent(serve_new=True)
        catalogue.execute("select topology.set_master('r1', 'r1-i2')")
        assert snapshots.acquire(timeout=10)
        assert [each.master for each in client.topology.replicasets.values()] != masters
        client.stop()
        thread.join(30)
        client.close()


def test_a_client_stays_with_a_relay_that_answers_heartbeats(relay):
    with TopologyClient(impatient(relay.conninfo(), 0.3)) as client:
        assert client.receive(1) == []
        relay.wait_for("in term")
        assert client.receive(0) == []


def test_of_several_servers_none_of_which_answers_each_is_named(relay):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = relay.conninfo(host="127.0.0.1,127.0.0.1", port=f"{port},1", connect_timeout=1)
        with pytest.raises(ServerUnavailable, match=f"port {port} said nothing for 1 s.*port 1 failed"):
            TopologyClient(place).connect()


def test_a_client_that_found_no_relay_leaves_nothing_open():
    client = TopologyClient("host=127.0.0.1 port=1 user=ann")
    gc.collect()
    before = len(list(OPEN.iterdir()))
    with pytest.raises(ServerUnavailable, match="port 1 failed"), client:
        pass
    assert len(list(OPEN.iterdir())) == before - 2


def test_a_client_may_be_one_of_many_open_files(relay, catalogue):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = []
    try:
        while not files or files[-1] < 1024:
            files.append(os.dup(0))
        with TopologyClient(relay.conninfo()) as client:
            catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
            assert len(client.receive(30)) == 1
    finally:
        for one in files:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
