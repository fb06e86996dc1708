"""A replicaset that fails over: a master, i0, and its standbys i1 and i2."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg

from demo.postgres import Cluster
from tests.suite import clusters
from tests.waiting import until

INSTANCES = "dbname=postgres user=postgres"
REPLAYED = "select pg_last_wal_receive_lsn() is not null"
"""Whether a standby has replayed what it had when it was started."""


@contextmanager
def standbys_of(server: str, primary: Cluster) -> Iterator[list[Cluster]]:
    """Two of a new cluster, which have all that there is; removed at the end."""
    with ExitStack() as made:
        standbys = []
        for _ in range(2):
            standbys.append(clusters.new_standby(server, primary))
            made.callback(standbys[-1].remove)
        for standby in standbys:
            wait_until(standby, REPLAYED)
        yield standbys


def make_replicaset(connection: psycopg.Connection[Any], servers: Sequence[Cluster]) -> None:
    """One in the catalogue, called r."""
    connection.execute("select topology.add_replicaset('r')")
    for number, server in enumerate(servers):
        address = f"127.0.0.1:{server.port}"
        connection.execute("select topology.add_instance(%s, 'r', %s)", [f"i{number}", address])
    connection.execute("select topology.set_master('r', 'i0')")


def master(catalogue: psycopg.Connection[Any]) -> str:
    query = "select current_master_name from topology._pico_replicaset where name = 'r'"
    row = catalogue.execute(query).fetchone()
    assert row is not None
    return str(row[0])


def is_standby(server: Cluster) -> bool:
    with psycopg.connect(server.conninfo()) as connection:
        return connection.execute("select pg_is_in_recovery()").fetchone() == (True,)


def wait_until(server: Cluster, condition: str) -> None:
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        until(connection, condition)


def start(standby: Cluster) -> None:
    standby.start()
    wait_until(standby, REPLAYED)


@contextmanager
def in_place_of_the_master(
    catalogue: psycopg.Connection[Any], meet: Callable[[socket.socket], None]
) -> Iterator[None]:
    """While it lasts, whoever comes to where the catalogue says that i0 is meets that."""

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                meet(client)

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=serve, daemon=True).start()
        catalogue.execute("select topology.set_address('i0', %s)", [f"127.0.0.1:{server.getsockname()[1]}"])
        yield
        server.shutdown(socket.SHUT_RDWR)
