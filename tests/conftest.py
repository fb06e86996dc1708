"""The servers and databases of the tests: a cluster for each process of a run, and a database for each test."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from demo.postgres import Cluster
from tests.pooler import pooler
from tests.proxy import Proxy, proxy_before
from tests.suite import clusters, java, room
from tests.suite.clusters import TEMPLATE

room.take()
java.start_soon()
# Imports and collection create many objects that live until the end. Without this, the garbage collector would examine
# them again and again, for a quarter of the CPU time.
gc.disable()

pytest_plugins = [
    "pytester",
    "tests.airflow_metadata",
    *(f"tests.suite.{name}" for name in ("servers", "kinds", "order", "measure", "shares", "logs")),
]

_numbers = itertools.count()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never examine the objects of imports and collection."""
    gc.freeze()
    gc.enable()


def database(cluster: Cluster, template: str) -> Iterator[str]:
    """Copy a database, and drop the copy at the end of the block. Yield its connection string."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    connection = clusters.maintenance_connection(cluster)
    connection.execute(
        sql.SQL("create database {} template {} strategy file_copy").format(
            sql.Identifier(name), sql.Identifier(template)
        )
    )
    yield cluster.conninfo(name)
    connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def db(cluster: Cluster) -> Iterator[str]:
    """Yield the connection string of a database with all our schemas."""
    yield from database(cluster, TEMPLATE)


@pytest.fixture
def other_db(cluster: Cluster) -> Iterator[str]:
    """A second database with all our schemas, in the same cluster."""
    yield from database(cluster, TEMPLATE)


@pytest.fixture
def bare_db(cluster: Cluster) -> Iterator[str]:
    """An empty database."""
    yield from database(cluster, "template1")


@pytest.fixture
def own_cluster(server: str) -> Iterator[Cluster]:
    """A cluster for this test alone.

    Use it in tests that crash their server, or that fail if other sessions hold back xmin.
    """
    cluster = clusters.new_cluster(server)
    yield cluster
    cluster.remove()


@pytest.fixture
def own_database(own_cluster: Cluster) -> str:
    """A database with all our schemas, in a cluster for this test alone."""
    clusters.install(own_cluster)
    return own_cluster.conninfo()


@pytest.fixture
def connect_to() -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """Connections that are closed when the test ends."""
    with ExitStack() as opened:

        def open_one(conninfo: str, *, autocommit: bool = True) -> psycopg.Connection[Any]:
            return opened.enter_context(_closing(psycopg.connect(conninfo, autocommit=autocommit)))

        yield open_one


@pytest.fixture
def connect(
    db: str, connect_to: Callable[..., psycopg.Connection[Any]]
) -> Callable[..., psycopg.Connection[Any]]:
    """Connections to ``db`` that are closed when the test ends."""
    return lambda *, autocommit=True: connect_to(db, autocommit=autocommit)


@pytest.fixture
def connection(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """A connection to ``db``, as its owner."""
    return connect()


class _closing:
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def __enter__(self) -> psycopg.Connection[Any]:
        return self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@pytest.fixture
def proxy(db: str) -> Iterator[Proxy]:
    """A proxy through which clients connect to the server of ``db``."""
    with proxy_before(int(conninfo_to_dict(db)["port"])) as proxy:
        yield proxy


@dataclass(frozen=True)
class Role:
    name: str
    conninfo: str


@pytest.fixture
def role(db: str, cluster: Cluster) -> Iterator[Callable[[str], Role]]:
    """Login roles with no rights, dropped when the test ends."""
    made: list[str] = []

    def make(purpose: str) -> Role:
        name = f"{purpose}_{os.getpid()}_{next(_numbers)}"
        connection = clusters.maintenance_connection(cluster)
        connection.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        made.append(name)
        return Role(name, make_conninfo(db, user=name))

    yield make
    if made:
        with psycopg.connect(db, autocommit=True) as connection:
            for name in made:
                connection.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(name)))
                connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def pgbouncer(db: str) -> Iterator[str]:
    """The connection string of a pooler in transaction mode, through which clients connect to ``db``."""
    with pooler(db) as conninfo:
        yield conninfo
