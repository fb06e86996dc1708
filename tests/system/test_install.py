"""The built wheel as a user installs it: without constraints, so with what the registries have on this day."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from demo.spark import clean_environment
from tests.extras import EXTRAS
from tests.spark_session import track
from tests.suite import java

pytestmark = pytest.mark.release("make install-test has it: it downloads what the registries have on the day")

ROOT = Path(__file__).parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CHANGES = 25_000
"""More than a driver reads and stages itself."""
HEAVY = {"pyspark", "pyspark-client", "pyarrow", "adbc-driver-postgresql", "adbc-driver-manager"}
LIGHTEST = 1.25
"""How many times as large as Airflow alone the package without extras may be."""

APPLICATION = """
from pyspark.sql import functions as f
from airflow_pgchange.spark.job import batch_job

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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def install():
    """A function that makes an environment with some packages and nothing else; its Python."""
    uv = Path(sys.executable).parent / "uv"
    trusted = {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    java.CACHE.mkdir(exist_ok=True)
    # On a disk: it is a gigabyte.
    with ExitStack() as made:

        def install(*packages):
            folder = Path(made.enter_context(TemporaryDirectory(dir=java.CACHE)))
            python = folder / "bin" / "python"
            making = ["venv", "--allow-existing", "--python", sys.executable, folder]
            for command in (making, ["pip", "install", "--python", python, *packages]):
                ran = subprocess.run(
                    [uv, *command], env=trusted | os.environ, capture_output=True, text=True, check=False
                )
                assert ran.returncode == 0, ran.stderr
            return python

        yield install


def environment(python):
    """Of the programs of an installation."""
    kept = {
        name: value
        for name, value in clean_environment().items()
        if name not in ("PYTHONPATH", java.VARIABLE)
    }
    path = os.pathsep.join((str(python.parent), kept["PATH"]))
    return kept | {"PATH": path, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}


def installed(python, folder):
    """Versions and sizes of what an environment has."""
    return json.loads(run(python, INSTALLED, cwd=folder).splitlines()[-1])


def megabytes(found):
    return sum(size for _, size in found.values()) / 1e6


def run(python, code, *arguments, cwd):
    ran = subprocess.run(
        [python, "-c", code, *arguments],
        env=environment(python),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return ran.stdout


@pytest.mark.timeout(900)
def test_a_large_batch_runs_with_what_pip_takes_by_itself(install, wheel, db, connect, tmp_path):
    """Minutes where the packages are not in uv's cache."""
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
def test_without_extras_everything_of_airflow_is_there_and_little_else(install, wheel, tmp_path):
    """Minutes where the packages are not in uv's cache."""
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
