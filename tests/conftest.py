"""Servers and databases for the tests: one cluster a run, a database a test, made from a template."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange import schema
from demo.postgres import Cluster, embedded_binaries, system_binaries
from tests.pooler import pooler

BINARIES = {"system": system_binaries, "embedded": embedded_binaries}
TEMPLATE = "pgchange_template"
CLUSTER = pytest.StashKey[Cluster]()

_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server", choices=sorted(BINARIES), default="system", help="which PostgreSQL to test on"
    )


def _make_cluster(config: pytest.Config) -> Cluster:
    cluster = Cluster.create(BINARIES[config.getoption("--server")]())
    config.stash[CLUSTER] = cluster
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(f"create database {TEMPLATE}")
    with psycopg.connect(cluster.conninfo(TEMPLATE), autocommit=True) as connection:
        schema.install(connection)
    return cluster


def pytest_configure_node(node: Any) -> None:
    """Hand the controller's cluster to each worker."""
    cluster = node.config.stash.get(CLUSTER, None) or _make_cluster(node.config)
    node.workerinput["cluster"] = (str(cluster.binaries), str(cluster.folder), cluster.port)


def pytest_unconfigure(config: pytest.Config) -> None:
    cluster = config.stash.get(CLUSTER, None)
    if cluster is not None:
        cluster.remove()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster of this run. Other tests use it too: its xmin is not undisturbed."""
    handed = getattr(request.config, "workerinput", {}).get("cluster")
    if handed is not None:
        binaries, folder, port = handed
        return Cluster(Path(binaries), Path(folder), port)
    return request.config.stash.get(CLUSTER, None) or _make_cluster(request.config)


def _database(cluster: Cluster, template: str) -> Iterator[str]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template {} strategy file_copy").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        yield cluster.conninfo(name)
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def db(cluster: Cluster) -> Iterator[str]:
    """A database with all our schemas; its connection string."""
    yield from _database(cluster, TEMPLATE)


@pytest.fixture
def other_db(cluster: Cluster) -> Iterator[str]:
    """A second database with all our schemas, in the same cluster."""
    yield from _database(cluster, TEMPLATE)


@pytest.fixture
def bare_db(cluster: Cluster) -> Iterator[str]:
    """A database with nothing in it."""
    yield from _database(cluster, "template1")


@pytest.fixture
def own_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for this test alone, for tests that crash it or that need its xmin undisturbed, and its transaction ids:
    autovacuum would use some, and hold some back."""
    cluster = Cluster.create(BINARIES[request.config.getoption("--server")](), {"autovacuum": "off"})
    yield cluster
    cluster.remove()


@pytest.fixture
def own_database(own_cluster: Cluster) -> str:
    """A database with all our schemas in a cluster of its own."""
    with psycopg.connect(own_cluster.conninfo(), autocommit=True) as connection:
        schema.install(connection)
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


class _closing:
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def __enter__(self) -> psycopg.Connection[Any]:
        return self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()


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
        with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
            connection.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        made.append(name)
        return Role(name, make_conninfo(db, user=name))

    yield make
    for name in made:
        with psycopg.connect(db, autocommit=True) as connection:
            connection.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(name)))
            connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def pgbouncer(db: str) -> Iterator[str]:
    """A pooler in transaction mode before ``db``; its connection string."""
    with pooler(db) as conninfo:
        yield conninfo
