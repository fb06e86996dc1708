"""The wheel and the source distribution as a user installs them: without constraints, with the current versions of the
registries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from airflow_pgchange import detached
from airflow_pgchange.spark.package import EXECUTOR_PACKAGES
from demo.spark import clean_environment
from tests.airflow_home import uri
from tests.extras import EXTRAS
from tests.spark_session import track
from tests.suite import java

pytestmark = pytest.mark.release("make install-test has it: it downloads what the registries have on the day")

ROOT = Path(__file__).parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CHANGES = 25_000
"""The number of changes of a batch. It is too large for the driver, so executors read and stage it."""
HEAVY = {"pyspark", "pyspark-client", "pyarrow", "adbc-driver-postgresql", "adbc-driver-manager"}
LIGHTEST = 1.25
"""The maximum size of the package without extras and all that it installs, as a multiple of the size of Airflow
alone."""

APPLICATION = """
from pyspark.sql import functions as f
from airflow_pgchange.spark.entry_point import batch_job

with batch_job() as job:
    planes = job.rows("public.plane", key="id")
    totals = planes.groupBy((f.col("id") % 10).alias("k")).agg(f.count("*").alias("n"))
    job.merge(totals, into="public.total", key="k", mode="add")
    job.merge(planes, into="public.copy", key="id", mode="mirror")
"""
CONSUMER = """
import os, subprocess, sys
from pathlib import Path
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.results.merge import merge, read_manifest
from airflow_pgchange.spark import submit

database, branch, folder = sys.argv[1:]
feed, manifest = CommitFeed("installed", int(branch)), Path(folder) / "manifest.json"
with ConsumerTransaction(feed, database) as consumer:
    batch = consumer.claim(1_000_000)
    environment = os.environ | submit.environment(batch, feed, database, None, manifest)
    command = ["spark-submit", "--master", "local[2]", "--py-files", submit.py_files(), Path(folder) / "application.py"]
    subprocess.run(command, env=environment, check=True)
    consumer.ack(lambda connection: merge(connection, batch, read_manifest(manifest)))
    print(batch.count)
"""
ON_A_SERVER = """
import sys
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.spark import SparkBatchOperator

branch, application = sys.argv[1:]
feed = CommitFeed("installed", int(branch))
task = SparkBatchOperator(task_id="copy", feed=feed, postgres_conn_id="airline", application=application)
print(task.execute({})["changes"])
"""
QUICK_START = """
import sys
import psycopg
from airflow_pgchange import CommitFeed
from airflow_pgchange.feeds import ConsumerTransaction

with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    connection.execute("create table payment (id bigint generated always as identity primary key)")
    branch = connection.execute("select revision.track('public.payment')").fetchone()[0]
    connection.execute("insert into payment select from generate_series(1, 3)")
with ConsumerTransaction(CommitFeed("balance", branch), sys.argv[1]) as consumer:
    batch = consumer.claim(10)
    consumer.ack()
print(batch.count)
"""
DISTRIBUTIONS = "PGCHANGE_DIST"
"""The variable that names a folder with both distributions, as `make dist` has built them."""
IMPORTED = """
import importlib, json, pkgutil
import airflow_pgchange
from airflow_pgchange.errors import ExtraMissing

refused = {}
for module in pkgutil.walk_packages(airflow_pgchange.__path__, "airflow_pgchange.", lambda name: None):
    try:
        importlib.import_module(module.name)
    except ExtraMissing as error:
        refused[module.name] = str(error)
print(json.dumps(refused))
"""
INSTALLED = """
import json
from importlib import metadata
print(json.dumps({
    one.name.lower(): [one.version, sum(file.size or 0 for file in one.files or ())] for one in metadata.distributions()
}))
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder of both distributions."""
    if DISTRIBUTIONS in os.environ:
        return Path(os.environ[DISTRIBUTIONS]).resolve()
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions):
    (built,) = distributions.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def install():
    """A function that creates an environment with packages, and returns its Python.

    The packages in ``alone`` are installed without their dependencies.
    """
    uv = Path(sys.executable).parent / "uv"
    trusted = {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    java.CACHE.mkdir(exist_ok=True)
    # Create the environments on disk and not in memory, because each is about a gigabyte.
    with ExitStack() as made:

        def install(*packages, alone=()):
            folder = Path(made.enter_context(TemporaryDirectory(dir=java.CACHE)))
            python = folder / "bin" / "python"
            making = ["venv", "--allow-existing", "--python", sys.executable, folder]
            commands = [making, ["pip", "install", "--python", python, *packages]]
            if alone:
                commands.append(["pip", "install", "--python", python, "--no-deps", *alone])
            for command in commands:
                ran = subprocess.run(
                    [uv, *command], env=trusted | os.environ, capture_output=True, text=True, check=False
                )
                assert ran.returncode == 0, ran.stderr
            return python

        yield install


def environment(python):
    """Return the environment variables for programs of an installation."""
    kept = {
        name: value
        for name, value in clean_environment().items()
        if name not in ("PYTHONPATH", java.VARIABLE)
    }
    path = os.pathsep.join((str(python.parent), kept["PATH"]))
    return kept | {"PATH": path, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}


def installed(python, folder):
    """Return the version and the size of each package in an environment."""
    return json.loads(run(python, INSTALLED, cwd=folder).splitlines()[-1])


def megabytes(found):
    return sum(size for _, size in found.values()) / 1e6


def run(python, code, *arguments, cwd, settings=None):
    ran = subprocess.run(
        [python, "-c", code, *arguments],
        env=environment(python) | (settings or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


@pytest.mark.timeout(900)
def test_a_large_batch_runs_with_what_pip_takes_by_itself(install, wheel, db, connect, tmp_path):
    """Takes minutes if the packages are not in uv's cache."""
    python = install(f"airflow-provider-pgchange[spark] @ {wheel.as_uri()}")
    found = installed(python, tmp_path)
    minor = {found[name][0].rpartition(".")[0] for name in ("pyspark", "pyspark-client")}
    assert len(minor) == 1
    print(f"{megabytes(found):.0f} MB with Spark")
    connection = connect()
    connection.execute(
        "create table plane (id bigint primary key, tail text); create table total (k bigint primary key, n bigint); "
        "create table copy (like plane including all)"
    )
    feed = track(connection, "plane")
    connection.execute(f"insert into plane select n, 'N' || n from generate_series(1, {CHANGES}) n")
    (tmp_path / "application.py").write_text(APPLICATION)
    told = run(python, CONSUMER, db, str(feed.branch), str(tmp_path), cwd=tmp_path)
    assert int(told.split()[-1]) == CHANGES
    assert connection.execute("select sum(n), count(*) from total").fetchone() == (CHANGES, 10)
    assert connection.execute("select count(*) from (table plane except table copy) d").fetchone() == (0,)
    assert connection.execute("select count(*) from copy").fetchone() == (CHANGES,)


@pytest.mark.timeout(900)
def test_a_driver_of_a_detached_batch_needs_nothing_of_airflow(install, wheel, db, connect, tmp_path):
    """Takes minutes if the packages are not in uv's cache. A handle is all that the driver is given."""
    spark = next(one for one in metadata.requires("airflow-provider-pgchange") if one.startswith("pyspark<"))
    python = install(*EXECUTOR_PACKAGES, spark.partition(";")[0], alone=[str(wheel)])
    found = installed(python, tmp_path)
    assert not [name for name in found if name.startswith("apache-airflow")]
    size = wheel.stat().st_size / 1e6
    print(f"the wheel has {size:.1f} MB, its driver {megabytes(found):.0f} MB with Spark")
    assert size < 2
    connection = connect()
    connection.execute(
        "create table plane (id bigint primary key, tail text); create table total (k bigint primary key, n bigint); "
        "create table copy (like plane including all)"
    )
    feed = track(connection, "plane")
    connection.execute("insert into plane select n, 'N' || n from generate_series(1, 20) n")
    handle = detached.claim(feed, db, lease="10 min", owner="a driver")
    settings = {"PGCHANGE_RESULTS": db, "PGCHANGE_HANDLE": str(handle)}
    run(python, APPLICATION, cwd=tmp_path, settings=settings)
    assert detached.ack(handle, db, staged=True)
    assert connection.execute("select count(*) from copy").fetchone() == (20,)


@pytest.mark.timeout(900)
def test_without_extras_everything_of_airflow_is_there_and_little_else(install, wheel, tmp_path):
    """Takes minutes if the packages are not in uv's cache."""
    python = install(f"airflow-provider-pgchange @ {wheel.as_uri()}")
    assert HEAVY.isdisjoint(installed(python, tmp_path))
    ours, alone = (megabytes(installed(one, tmp_path)) for one in (python, install("apache-airflow")))
    print(f"{ours:.0f} MB, Airflow alone {alone:.0f} MB")
    assert ours < LIGHTEST * alone
    refused = json.loads(run(python, IMPORTED, cwd=tmp_path).splitlines()[-1])
    assert set(refused) <= set().union(*EXTRAS.values())
    for name, said in refused.items():
        (extra,) = (extra for extra, modules in EXTRAS.items() if name in modules)
        assert f"pip install 'airflow-provider-pgchange[{extra}]'" in said
    assert "airflow_pgchange.operators.spark" in refused


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_the_quick_start_runs_from_each_distribution(install, distributions, bare_db, tmp_path, pattern):
    """Takes minutes if the packages are not in uv's cache."""
    (built,) = distributions.glob(pattern)
    python = install(f"airflow-provider-pgchange @ {built.as_uri()}")
    program = [python.parent / "airflow-pgchange", "install", "--dsn", bare_db]
    home = environment(python) | {"AIRFLOW_HOME": str(tmp_path)}
    installing = subprocess.run(program, env=home, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert installing.returncode == 0, installing.stderr[-3000:]
    assert run(python, QUICK_START, bare_db, cwd=tmp_path).split()[-1] == "3"


@pytest.mark.timeout(900)
def test_a_client_of_a_connect_server_needs_no_java(install, wheel, connect_server, db, connect, tmp_path):
    """Takes minutes if the packages are not in uv's cache."""
    python = install(f"airflow-provider-pgchange[spark-connect] @ {wheel.as_uri()}")
    found = installed(python, tmp_path)
    assert "pyspark" not in found
    print(f"{megabytes(found):.0f} MB with the client of Spark Connect")
    connection = connect()
    connection.execute(
        "create table plane (id bigint primary key, tail text); create table total (k bigint primary key, n bigint); "
        "create table copy (like plane including all)"
    )
    feed = track(connection, "plane")
    connection.execute("insert into plane select n, 'N' || n from generate_series(1, 20) n")
    (tmp_path / "application.py").write_text(APPLICATION)
    settings = {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW_CONN_AIRLINE": uri(db),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(connect_server.connection),
        "JAVA_HOME": "",
        "PATH": str(python.parent),
    }
    assert shutil.which("java", path=settings["PATH"]) is None
    told = run(
        python,
        ON_A_SERVER,
        str(feed.branch),
        str(tmp_path / "application.py"),
        cwd=tmp_path,
        settings=settings,
    )
    assert told.split()[-1] == "20"
    assert connection.execute("select count(*) from copy").fetchone() == (20,)
