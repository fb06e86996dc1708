"""A real standalone Spark cluster with two workers and drivers in client mode: no secret leaks, and no process
outlives its task."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.feeds import ConsumerTransaction
from airflow_pgchange.results.merge import merge, read_manifest
from airflow_pgchange.spark import submit
from airflow_pgchange.spark.job import SMALL
from demo.flights import DDL
from demo.spark import StandaloneSpark, clean_environment
from tests.airflow_home import DAGS
from tests.quick_spark import JAVA, QUICK
from tests.spark_session import track
from tests.suite.processes import runs

pytestmark = pytest.mark.release(
    "a cluster takes a minute; every run has the executors of a Connect server, on which the same secrets are looked for"
)
SECRET = "hunter2-of-the-airline"
CHANGES = SMALL + 5_000
PATIENCE = 600.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def until(found, what):
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.05)
    return value


def environment() -> dict[str, str]:
    """Return the environment without this checkout on Python's path, because code in Spark must come from the zip."""
    kept = {key: value for key, value in clean_environment().items() if key != "PYTHONPATH"}
    return {**kept, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}


def fetch(url: str) -> str:
    """Return the content of a page, without a proxy of the environment."""
    return str(DIRECT.open(url).read().decode())


@pytest.fixture(scope="module")
def spark_cluster():
    with StandaloneSpark() as cluster:
        yield cluster


def written(cluster: StandaloneSpark) -> str:
    """Everything that master, workers and executors wrote to files."""
    files = [
        path for path in cluster.folder.rglob("*") if path.is_file() and path.suffix not in (".jar", ".zip")
    ]
    return "\n".join(path.read_text(errors="replace") for path in files)


@pytest.fixture
def movements(connect):
    """The demo's tables, with too many movements for the driver to read itself."""
    connection = connect()
    connection.execute(DDL)
    feed = track(connection, "public.movement", "delays")
    connection.execute(
        "insert into public.movement (kind, flight_date, carrier, flight, origin, dest, at, delay) "
        "select (array['departure', 'arrival', 'cancellation'])[1 + n %% 3], '2013-01-01', 'C' || n %% 5, n, "
        "'O' || n %% 7, 'D' || n %% 11, '2013-01-01', n %% 60 from generate_series(1, %s) n",
        [CHANGES],
    )
    return connection, feed


ROUTES = """
select carrier, origin, dest, count(*) filter (where kind = 'departure'), count(*) filter (where kind = 'arrival'),
       count(*) filter (where kind = 'cancellation'),
       coalesce(sum(delay) filter (where kind = 'departure'), 0)::bigint,
       coalesce(sum(delay) filter (where kind = 'arrival'), 0)::bigint
from public.movement group by 1, 2, 3 order by 1, 2, 3
"""


def command(master: str, application: Path, conf: dict[str, str]) -> list[str]:
    defaults = {
        "spark.executor.memory": "600m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.port": "0",
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
    }
    confs = [part for name, value in {**defaults, **conf}.items() for part in ("--conf", f"{name}={value}")]
    return ["spark-submit", "--master", master, *confs, "--py-files", submit.py_files(), str(application)]


SPY = """
import json, re, runpy, sys, urllib.request
from pyspark.sql import SparkSession
from airflow_pgchange.spark import request

# Its only batch: no operator is there to hand it another.
request.take_next = lambda: None
runpy.run_path({demo!r}, run_name="__main__")
context = SparkSession.getActiveSession().sparkContext
reader = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
rest = "/api/v1/applications/" + context.applicationId
pages = ["/jobs/", "/stages/", "/storage/", "/environment/", "/executors/", "/SQL/", rest + "/jobs", rest + "/stages",
         rest + "/environment", rest + "/executors", rest + "/sql?details=true&planDescription=true&length=100"]
seen = {{}}
while pages:
    page = pages.pop(0)
    if page not in seen:
        seen[page] = reader.open(context.uiWebUrl + page).read().decode()
        pages += re.findall(r"/SQL/execution/\\?id=\\d+|/stages/stage/\\?id=\\d+&amp;attempt=\\d+", seen[page])
        pages = [one.replace("&amp;", "&") for one in pages]
open({out!r}, "w").write(json.dumps(seen))
"""


def test_the_demos_job_runs_on_a_cluster_and_the_password_appears_nowhere(
    spark_cluster, movements, db, tmp_path
):
    """Takes a minute: a master, workers, a driver and an executor are started, and their files are searched."""
    connection, feed = movements
    # Use a URI: in a connection string, Spark itself redacts the text after the word password.
    server = conninfo_to_dict(db)
    conninfo = f"postgresql://postgres:{SECRET}@{server['host']}:{server['port']}/{server['dbname']}"
    application, seen = tmp_path / "spy.py", tmp_path / "pages.json"
    application.write_text(SPY.format(demo=str(DAGS / "spark" / "route_delays.py"), out=str(seen)))
    events = tmp_path / "events"
    events.mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(events),
        "spark.eventLog.compress": "false",
    }
    command_lines: set[str] = set()
    with ConsumerTransaction(feed, conninfo) as consumer:
        batch = consumer.claim(1_000_000)
        manifest = tmp_path / "manifest.json"
        handed = submit.environment(batch, feed, conninfo, None, manifest)
        ended = threading.Event()
        watch = threading.Thread(target=look_at_command_lines, args=(command_lines, ended))
        watch.start()
        ran = subprocess.run(
            command(spark_cluster.master_url, application, conf), env={**environment(), **handed}, cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        ended.set()
        watch.join()
        assert ran.returncode == 0, ran.stderr[-5000:]
        staged = read_manifest(manifest)
        assert all(attempt >= 0 for attempt, _ in staged[0].winners), "the driver staged it"
        consumer.ack(lambda open_one: merge(open_one, batch, staged))
    assert connection.execute("table public.route_delay order by 1, 2, 3").fetchall() == (
        connection.execute(ROUTES).fetchall()
    )
    pages = json.loads(seen.read_text())
    master = f"http://127.0.0.1:{spark_cluster.ui_port}"
    assert len(pages) > 12
    log = "\n".join(path.read_text() for path in events.rglob("*") if path.is_file())
    where = {
        "command lines": "\n".join(command_lines),
        "the driver's output": ran.stdout + ran.stderr,
        "the event log": log,
        "cluster and executors": written(spark_cluster),
        "the master's pages": fetch(master) + fetch(f"{master}/json/"),
        **pages,
    }
    traces = {
        "command lines": "spy.py",
        "the event log": "pgchange",
        "cluster and executors": "Launch command",
    }
    assert [place for place, trace in traces.items() if trace not in where[place]] == [], (
        "looked in the wrong place"
    )
    assert [place for place, text in where.items() if SECRET in text] == []


def look_at_command_lines(seen: set[str], ended: threading.Event) -> None:
    while not ended.wait(0.05):
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                seen.add((process / "cmdline").read_text(errors="replace"))


SLOW = """
import time
from airflow_pgchange.spark.entry_point import batch_job

def slowly(batches):
    time.sleep(2)
    yield from batches

with batch_job() as job:
    rows = job.rows("public.movement", key="id", columns=["carrier"]).select("id", "carrier").repartition(8)
    job.merge(rows.mapInArrow(slowly, rows.schema), into="public.copied", key=[], mode="append")
"""


def test_an_executor_that_is_killed_loses_and_doubles_nothing(spark_cluster, movements, db, tmp_path):
    """Takes a minute: a cluster starts, and Spark has to notice the killed executor and replace it."""
    connection, feed = movements
    connection.execute("create table public.copied (id bigint, carrier text)")
    application = tmp_path / "slow.py"
    application.write_text(SLOW)
    with ConsumerTransaction(feed, db) as consumer:
        batch = consumer.claim(1_000_000)
        manifest = tmp_path / "manifest.json"
        handed = submit.environment(batch, feed, db, None, manifest)
        with subprocess.Popen(
            command(spark_cluster.master_url, application, QUICK), env={**environment(), **handed}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as driver:  # fmt: skip
            until(lambda: staged_rows(connection), "the first rows in staging")
            victim = executors(spark_cluster)[0]
            os.kill(victim, signal.SIGKILL)
            said, _ = driver.communicate()
        assert driver.returncode == 0, said[-5000:]
        assert re.search("Lost executor|ExecutorLostFailure|Executor .* lost", said), "the fault did not fire"
        consumer.ack(lambda open_one: merge(open_one, batch, read_manifest(manifest)))
    found = connection.execute("select count(*), count(distinct id) from public.copied").fetchone()
    assert found == (CHANGES, CHANGES)


def staged_rows(connection) -> int:
    tables = connection.execute("select name from pgchange.staged_tables()").fetchall()
    return sum(
        connection.execute(f"select count(*) from pgchange_staging.{name}").fetchone()[0]
        for (name,) in tables
    )


def executors(cluster: StandaloneSpark) -> list[int]:
    """Return the process ids of this cluster's executors."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_text(errors="replace")
            if (
                "CoarseGrainedExecutorBackend" in line
                and "java" in line
                and working_in(process, cluster.folder)
            ):
                found.append(int(process.name))
    return found


def working_in(process: Path, folder: Path) -> bool:
    return folder in (process / "cwd").readlink().parents


OPERATOR = """
import os, subprocess, sys
from airflow_pgchange.spark import submit
sys.exit(subprocess.Popen(sys.argv[1:], preexec_fn=submit.die_with_parent, start_new_session=True).wait())
"""
FOREVER = """
import os, time
from pyspark.sql.functions import udf
from airflow_pgchange.spark.entry_point import batch_job

def wait(value):
    open(os.path.join({folder!r}, "worker-%s" % os.getpid()), "w").close()
    time.sleep(600)

with batch_job() as job:
    open(os.path.join({folder!r}, "driver-%s" % os.getpid()), "w").close()
    open(os.path.join({folder!r}, "jvm-%s" % os.getppid()), "w").close()
    job.spark.range(2).select(udf(wait)("id")).collect()
"""


def test_a_killed_operator_leaves_no_jvm_no_driver_and_no_worker_behind(movements, db, tmp_path):
    """Takes half a minute: a driver on the cluster has to be at work before its operator is killed."""
    _, feed = movements
    application, pids = tmp_path / "forever.py", tmp_path / "pids"
    pids.mkdir()
    application.write_text(FOREVER.format(folder=str(pids)))
    with ConsumerTransaction(feed, db) as consumer:
        batch = consumer.claim(1_000_000)
        consumer.ack()
    handed = submit.environment(batch, feed, db, None, tmp_path / "manifest.json")
    whole = {**environment(), **handed, "PYTHONPATH": submit.py_files()}
    line = [sys.executable, "-c", OPERATOR, *command("local[2]", application, {})]
    with subprocess.Popen(line, env=whole, cwd=tmp_path, stderr=subprocess.DEVNULL) as operator:
        until(lambda: len(list(pids.glob("worker-*"))) == 2, "both workers")
        processes = {path.name: int(path.name.partition("-")[2]) for path in pids.iterdir()}
        assert {name for name, pid in processes.items() if runs(pid)} == set(processes)
        assert len(processes) == 4
        operator.kill()
    until(lambda: not any(runs(pid) for pid in processes.values()), "the end of JVM, driver and workers")
