"""The choice of PostgreSQL for a test: in each run one of the two servers, and after the next commit the other server.

``--servers`` chooses. ``shared`` uses the server that a hash of the test's name and the number of commits choose.
``other`` uses the other server, ``both`` uses both, and the name of a server uses that server. A release runs both. A
major version, such as ``17``, is the server of ``tests/suite/postgresql.py`` that has it. The marker ``hstore`` is for
tests that need the extension, which the server of the wheel lacks.
"""

from __future__ import annotations

import functools
import subprocess
import zlib
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from demo.postgres import Cluster
from tests.suite import clusters

STARTED = pytest.StashKey[dict[str, Cluster]]()
Way = TypeVar("Way")
CHOICES = ("shared", "other", "both", *clusters.SERVERS, *clusters.ON_DEMAND)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--servers", choices=CHOICES, default="shared", help="which PostgreSQL a test runs on")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hstore: on servers that have this extension")
    config.stash[STARTED] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    for started in config.stash[STARTED].values():
        started.remove()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        metafunc.parametrize("server", _chosen(metafunc), indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose chosen server lacks an extension that they need."""
    unable = [item for item in items if _marked(item, "hstore") and not has_hstore(_server_of(item))]
    if unable:
        config.hook.pytest_deselected(items=unable)
        items[:] = [item for item in items if item not in set(unable)]


def _chosen(metafunc: pytest.Metafunc) -> list[str]:
    """Return the servers on which a test runs."""
    asked = metafunc.config.getoption("--servers")
    if asked in (*clusters.SERVERS, *clusters.ON_DEMAND):
        return [asked]
    hstore = _marked(metafunc.definition, "hstore")
    able = [name for name in clusters.SERVERS if not hstore or has_hstore(name)]
    if asked in ("shared", "other") and _has_hstore_case(metafunc):
        # `make test` takes the server with hstore. The hash of the test's name could choose the server that cannot run
        # all of its cases.
        able.sort(key=has_hstore, reverse=asked == "shared")
        return able[:1]
    return one_of(able, metafunc)


def _has_hstore_case(metafunc: pytest.Metafunc) -> bool:
    """Whether some cases of a parametrized test need hstore, and not all."""
    cases = [case for mark in metafunc.definition.iter_markers("parametrize") for case in mark.args[1]]
    return any(mark.name == "hstore" for case in cases for mark in getattr(case, "marks", ()))


def one_of(ways: list[Way], metafunc: pytest.Metafunc) -> list[Way]:
    """Choose one of several ways in which a test can run; ``--servers both`` and a server's name keep all of them.

    The next commit chooses the next way, so that two commits have seen both.
    """
    asked = metafunc.config.getoption("--servers")
    if asked not in ("shared", "other"):
        return ways
    turn = _commits(metafunc.config.rootpath) + (asked == "other")
    return [ways[(_number(metafunc, ways) + turn) % len(ways)]]


@functools.cache
def _commits(root: Path) -> int:
    """The number of commits behind the working tree; 0 outside of a repository."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=root, check=False, capture_output=True, text=True
    )
    return int(counted.stdout) if counted.returncode == 0 else 0


def runs_elsewhere_too(item: pytest.Item) -> bool:
    """Whether a test could run on another server, too, but now runs on a single server."""
    callspec = getattr(item, "callspec", None)
    shared = item.config.getoption("--servers") in ("shared", "other")
    if not shared or callspec is None or "server" not in callspec.params:
        return False
    return not _marked(item, "hstore")


def _number(metafunc: pytest.Metafunc, ways: list[Any]) -> int:
    """Return a hash of a test's name, or of its file's name if its tests share an expensive fixture."""
    fixtures = metafunc.definition._fixtureinfo.name2fixturedefs.values()
    together = any(found[-1].scope == "module" for found in fixtures)
    path = metafunc.definition.path.relative_to(metafunc.config.rootpath).as_posix()
    name = path if together else f"{path}::{metafunc.function.__name__}"
    return zlib.crc32(f"{name} {ways}".encode())


def _marked(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _server_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "system" if callspec is None else str(callspec.params.get("server", "system"))


@functools.cache
def has_hstore(server: str) -> bool:
    """Whether a server has the extension. Servers from npm have it, but have no pg_config."""
    if server in clusters.ON_DEMAND:
        return True
    told = subprocess.run(
        [clusters.SERVERS[server]() / "pg_config", "--sharedir"], check=True, capture_output=True, text=True
    )
    return Path(told.stdout.strip(), "extension", "hstore.control").exists()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> str:
    """The name of the PostgreSQL that this test runs on."""
    return str(getattr(request, "param", "system"))


@pytest.fixture(scope="session")
def cluster(server: str, request: pytest.FixtureRequest) -> Cluster:
    """The cluster that the tests of this process share."""
    started = request.config.stash[STARTED]
    if server not in started:
        started[server] = clusters.new_cluster(server, family=0)
        # The first session in a database writes the cache of its catalogue (pg_internal.init), and a start removes it.
        # Copies of the template have it from here on: their first session takes half of the CPU time.
        psycopg.connect(started[server].conninfo(clusters.TEMPLATE)).close()
    return started[server]
