"""Clusters that a test may crash, fail over and restore."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from demo.postgres import Cluster
from tests import deltas, s3
from tests.suite import clusters
from tests.suite.servers import one_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the alternatives of a campaign: a normal run takes one of each, and a release takes both."""
    for way in ("in_order", "elsewhere"):
        if way in metafunc.fixturenames:
            metafunc.parametrize(way, one_of([False, True], metafunc))


@pytest.fixture
def empty_cluster(server: str) -> Iterator[Callable[..., Cluster]]:
    """Create new, empty clusters."""
    families = itertools.count(1)
    with ExitStack() as made:

        def make(**settings: str) -> Cluster:
            cluster = clusters.new_cluster(server, settings, next(families))
            made.callback(cluster.remove)
            return cluster

        yield make


@pytest.fixture
def new_cluster(empty_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """Create new clusters with all our schemas."""

    def make(**settings: str) -> Cluster:
        cluster = empty_cluster(**settings)
        clusters.install(cluster)
        return cluster

    return make


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Server]:
    """An S3 server, which all processes find through their environment."""
    with s3.server() as server:
        catalogs = [s3.environment(server.settings, catalog) for catalog in ("LAKE", "REST")]
        for settings in (*catalogs, deltas.environment(server)):
            for name, value in settings.items():
                monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def standby_of() -> Iterator[Callable[..., Cluster]]:
    """Streaming standbys."""
    with ExitStack() as made:

        def make(primary: Cluster, **settings: str) -> Cluster:
            standby = primary.standby(settings)
            made.callback(standby.remove)
            return standby

        yield make
