"""Clusters that a test may crash, fail over and restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from airflow_pgchange import schema
from demo.postgres import Cluster
from tests.conftest import BINARIES


@pytest.fixture
def binaries(request: pytest.FixtureRequest) -> Path:
    """The PostgreSQL that this run tests."""
    return BINARIES[request.config.getoption("--server")]()


@pytest.fixture
def empty_cluster(binaries: Path) -> Iterator[Callable[..., Cluster]]:
    """New clusters with nothing in them."""
    with ExitStack() as made:

        def make(**settings: str) -> Cluster:
            cluster = Cluster.create(binaries, settings)
            made.callback(cluster.remove)
            return cluster

        yield make


@pytest.fixture
def new_cluster(empty_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """New clusters with all our schemas."""

    def make(**settings: str) -> Cluster:
        cluster = empty_cluster(**settings)
        with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
            schema.install(connection)
        return cluster

    return make


@pytest.fixture
def standby_of() -> Iterator[Callable[..., Cluster]]:
    """Streaming standbys."""
    with ExitStack() as made:

        def make(primary: Cluster, **settings: str) -> Cluster:
            standby = primary.standby(settings)
            made.callback(standby.remove)
            return standby

        yield make
