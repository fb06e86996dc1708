"""Fixtures that several folders of integration tests share."""

import json
import sys
from collections import OrderedDict

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.feeds.connections import connect as feed_connect
from tests import dumps, s3, sagas, spark_server
from tests.airflow_home import prepare
from tests.batches import connections_reused
from tests.conftest import database
from tests.relay_process import relay_process
from tests.suite.clusters import TEMPLATE
from tests.suite.servers import one_of
from tests.topology import make_catalogue

prepare()


def pytest_generate_tests(metafunc):
    """Choose the ways of a test: how a batch is read and staged, and the kind and the store of a lake's table.

    A normal run tests one way, and a release all of them.
    """
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", one_of(["driver", "executors"], metafunc), indirect=True)
        if "lake" in metafunc.fixturenames:
            metafunc.parametrize("lake", one_of(["local files", "S3", "Delta"], metafunc), indirect=True)


@pytest.fixture(autouse=True)
def errors_of_operators(monkeypatch):
    """Before Airflow 3.3 an operator raises AirflowFailException from an error that no retry corrects. Here it raises the
    error itself, as with later versions; tests/unit/test_retry_policy.py tests the exception."""
    compat = sys.modules.get("airflow_pgchange.utils.compat")
    if hasattr(compat, "_evaluated"):
        monkeypatch.setattr(compat, "AirflowFailException", lambda _: sys.exception())


@pytest.fixture
def path(request, monkeypatch):
    """The way in which a batch is read and staged: by the driver or by executors."""
    monkeypatch.setattr("airflow_pgchange.spark.job.SMALL", 1_000_000 if request.param == "driver" else 0)
    return request.param


@pytest.fixture
def executors(monkeypatch):
    """Let executors read and stage even a small batch, which the driver would otherwise process itself."""
    monkeypatch.setattr("airflow_pgchange.spark.job.SMALL", 0)


@pytest.fixture
def connect_server(monkeypatch):
    """A Spark Connect server that tests share, with a user for this test alone.

    Airflow's connection ``spark_default`` leads to it.
    """
    server = spark_server.as_user_of_its_own()
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(server.connection))
    return server


@pytest.fixture
def few_sessions():
    """Let all consumer transactions of a test use the same connections."""
    with connections_reused():
        yield


@pytest.fixture
def results(db):
    """A connection to a database of results, as a consumer opens it."""
    with feed_connect(db) as connection:
        yield connection


@pytest.fixture
def catalogue(connect):
    """A connection to a database with a catalogue."""
    connection = connect()
    make_catalogue(connection)
    return connection


@pytest.fixture
def relay(db, catalogue):
    """A relay of that catalogue."""
    with relay_process(db) as process:
        yield process


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server. Each test creates its own buckets."""
    with s3.server() as server:
        yield server


@pytest.fixture
def rest(tmp_path, monkeypatch):
    """A REST catalog of Iceberg, named ``rest`` in PyIceberg's configuration."""
    from tests import rest_catalog

    with rest_catalog.running(tmp_path, monkeypatch) as rest:
        yield rest


@pytest.fixture
def lake(request, db, tmp_path, monkeypatch):
    """A lake with its catalog in ``db``. PyIceberg's configuration says how to reach its files."""
    from tests.lakes import Lake

    if getattr(request, "param", None) == "Delta":
        from tests.deltas import DeltaLake

        return DeltaLake(tmp_path)
    if getattr(request, "param", None) != "S3":
        return Lake(db, tmp_path)
    server = request.getfixturevalue("s3_server")
    for name, value in s3.environment(server.settings).items():
        monkeypatch.setenv(name, value)
    return Lake(db, f"s3://{server.bucket()}", server.settings)


@pytest.fixture
def delta_location(request, tmp_path, monkeypatch):
    """A location for a Delta table. Environment variables say how to reach it."""
    from tests.deltas import environment

    if getattr(request, "param", None) != "S3":
        return str(tmp_path / "payment")
    server = request.getfixturevalue("s3_server")
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.bucket()}/payment"


KEPT = 6
"""Prepared databases that stay for later tests, of about 16 MB each; the server's folder is in memory."""


@pytest.fixture(scope="session")
def prepared(cluster):
    """A function that returns the name of a prepared database.

    It takes a function of a connection, which prepares the database once for all tests. Copying a prepared database
    takes half of the CPU time of preparing one for each test. A catalogue or an event log cannot be prepared: it
    records its database, and recognises that it was copied.
    """
    made = OrderedDict()

    def name_of(prepare):
        if prepare not in made:
            while len(made) >= KEPT:
                next(made.popitem(last=False)[1][0], None)
            databases = database(cluster, TEMPLATE)
            conninfo = next(databases)
            with psycopg.connect(conninfo, autocommit=True) as connection:
                prepare(connection)
            made[prepare] = databases, conninfo_to_dict(conninfo)["dbname"]
        made.move_to_end(prepare)
        return made[prepare][1]

    yield name_of
    for databases, _ in made.values():
        next(databases, None)


@pytest.fixture
def db(request, cluster, prepared):
    """A database with all our schemas, as its connection string.

    If a fixture of the test is called ``prepared_...``, its value is a function of a connection. The database is then a
    copy of a template that this function has prepared.
    """
    names = [name for name in request.fixturenames if name.startswith("prepared_")]
    assert len(names) <= 1, f"a test has one database: {names}"
    template = prepared(request.getfixturevalue(names[0])) if names else TEMPLATE
    yield from database(cluster, template)


@pytest.fixture(scope="module")
def shared_db(cluster):
    """A database that all tests of a module share and none of them changes, as its connection string.

    Use it for calls that are refused, and for facts that are only read. A database for each case would cost more than
    the call.
    """
    yield from database(cluster, TEMPLATE)


@pytest.fixture(scope="module")
def shared(shared_db):
    """A connection to ``shared_db`` as its owner, in autocommit mode."""
    with psycopg.connect(shared_db, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def toured(cluster):
    """The name of a database with the queues of a saga, for tests to copy. Creating the queues would take longer."""
    for made in database(cluster, TEMPLATE):
        with psycopg.connect(made, autocommit=True) as connection:
            sagas.prepare(connection)
        yield conninfo_to_dict(made)["dbname"]


@pytest.fixture
def restored(db, own_cluster, connect):
    """A function that dumps ``db``, restores it into another cluster, and returns a connection to it there."""
    opened = []

    def restore():
        dumps.load(own_cluster, own_cluster.conninfo(), dumps.dump(own_cluster, db, "--no-owner"))
        opened.append(psycopg.connect(own_cluster.conninfo(), autocommit=True))
        return opened[0]

    yield restore
    for connection in opened:
        connection.close()
