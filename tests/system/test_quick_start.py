"""The quick start of Spark's driver, with a real Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_pgchange.spark import submit
from demo.spark import clean_environment
from tests.suite import java

APPLICATION = """
from pyspark.sql import SparkSession
print("counted", SparkSession.builder.getOrCreate().range(10).count())
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    # A user who starts from one archive does not build the other.
    monkeypatch.delenv(java.VARIABLE, raising=False)
    values = clean_environment() | {"PYSPARK_PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def test_spark_starts_from_the_archive_that_the_set_up_has_made(monkeypatch):
    options = java.KEPT.read_text()
    assert "SharedArchiveFile" in options
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(java.VARIABLE, raising=False)
    # With -Xshare:on Java refuses to start where it cannot use the archive.
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", f"{options} -Xshare:on")
    ran = subprocess.run(["spark-submit", "--version"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Welcome to" in ran.stdout + ran.stderr


@pytest.mark.release(
    "the set-up makes an archive by the same code, and every run starts Spark from that archive"
)
def test_the_archive_is_made_once_and_a_driver_starts_from_it(environment, tmp_path):
    """Takes minutes: the archive is made as at the set-up, from a driver's whole run, and one more starts from it."""
    conf = submit.startup_conf(fast_start=True)
    options = conf["spark.driver.extraJavaOptions"]
    assert "SharedArchiveFile" in options
    made = list(tmp_path.rglob("*.jsa"))
    assert len(made) == 1
    when = made[0].stat().st_mtime_ns
    assert submit.startup_conf(fast_start=True) == conf
    assert made[0].stat().st_mtime_ns == when
    application = tmp_path / "count.py"
    application.write_text(APPLICATION)
    # With -Xshare:on Java refuses to start where it cannot use the archive.
    confs = (
        "--conf",
        f"spark.driver.extraJavaOptions={options} -Xshare:on",
        "--conf",
        "spark.ui.enabled=false",
    )
    ran = subprocess.run(
        ["spark-submit", "--master", "local[1]", *confs, application],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "counted 10" in ran.stdout, ran.stderr[-3000:]
