"""Clusters that a test may crash, fail over and restore."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from demo.postgres import Cluster
from tests.suite import clusters
from tests.suite.servers import one_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A campaign goes one way of each of these, and in a release both."""
    for way in ("in_order", "elsewhere"):
        if way in metafunc.fixturenames:
            metafunc.parametrize(way, one_of([False, True], metafunc))


@pytest.fixture
def empty_cluster(server: str) -> Iterator[Callable[..., Cluster]]:
    """New clusters with nothing in them."""
    families = itertools.count(1)
    with ExitStack() as made:

        def make(**settings: str) -> Cluster:
            cluster = clusters.new_cluster(server, settings, next(families))
            made.callback(cluster.remove)
            return cluster

        yield make


@pytest.fixture
def new_cluster(empty_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """New clusters with all our schemas."""

    def make(**settings: str) -> Cluster:
        cluster = empty_cluster(**settings)
        clusters.install(cluster)
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
