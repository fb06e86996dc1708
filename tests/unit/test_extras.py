"""What an optional part says where its packages are missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata

import pyarrow as pa
import pytest

from airflow_pgchange.errors import ExtraMissing, VersionsDiffer
from airflow_pgchange.spark import arrow
from airflow_pgchange.spark.installed import (
    ARROW_DRIVER,
    check_arrow_driver,
    check_versions,
)
from airflow_pgchange.spark.job import batch_job
from airflow_pgchange.spark.misfits import Rows
from tests.extras import EXTRAS


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("airflow_pgchange.events.http", "fastapi", "http"),
        ("airflow_pgchange.events.webhooks", "httpcore", "http"),
        ("airflow_pgchange.events.webhooks", "standardwebhooks", "http"),
        ("airflow_pgchange.spark", "pyspark", "spark"),
        ("airflow_pgchange.spark", "pyarrow", "spark"),
        ("airflow_pgchange.spark", "adbc_driver_postgresql", "spark"),
        ("airflow_pgchange.utils.openlineage", "airflow.providers.openlineage.extractors", "openlineage"),
        (
            "airflow_pgchange.operators.spark",
            "airflow.providers.apache.spark.operators.spark_submit",
            "spark",
        ),
        (
            "airflow_pgchange.operators.spark_arguments",
            "airflow.providers.apache.spark.hooks.spark_submit",
            "spark",
        ),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(module, package, extra, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ExtraMissing, match=rf"needs? {package}: pip install 'airflow-provider-pgchange\[{extra}\]'"
    ):
        importlib.import_module(module)


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in ("pyspark", "pyarrow", "adbc_driver_postgresql", "adbc_driver_manager", "pandas",
             "airflow.providers.apache.spark.hooks", "airflow.providers.apache.spark.operators",
             "openlineage", "fastapi.routing", "httpcore", "standardwebhooks"):
    sys.modules[name] = None
import airflow_pgchange
from airflow_pgchange.errors import ExtraMissing

plugin, entry = "airflow_pgchange.plugins.", "airflow_pgchange.plugins.pgchange"
for module in pkgutil.walk_packages(airflow_pgchange.__path__, "airflow_pgchange.", lambda name: None):
    # The rest of the plugin is imported by the API server alone, which has all that it needs.
    if module.name.startswith(plugin) and module.name != entry:
        continue
    try:
        importlib.import_module(module.name)
    except ExtraMissing:
        print(module.name)
"""


def test_only_what_needs_an_extra_is_refused_without_extras():
    """Seconds: a process of its own imports the whole package."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) == set().union(*EXTRAS.values())


@pytest.mark.parametrize(
    ("versions", "oldest"),
    [
        ({"pyspark": "4.3.0", "pyspark-client": "4.2.0"}, "4.2.0"),
        ({"pyspark": "4.2.9", "pyspark-client": "4.2.10"}, "4.2.9"),
    ],
)
def test_spark_in_two_versions_is_told_before_a_job_begins(versions, oldest, monkeypatch):
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    wanted = f"pip install --force-reinstall --no-deps pyspark=={oldest} pyspark-client=={oldest}`"
    with (
        pytest.raises(VersionsDiffer, match="pyspark .* and pyspark-client .* overwrite each other") as told,
        batch_job(),
    ):
        pass
    assert wanted in str(told.value)


@pytest.mark.parametrize(
    "installed", [{}, {"pyspark": "4.3.0"}, {"pyspark": "4.2.1", "pyspark-client": "4.2.1"}]
)
def test_spark_in_one_version_or_of_a_cluster_is_left_alone(installed, monkeypatch):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    check_versions()


@pytest.fixture
def _asked_anew():
    check_arrow_driver.cache_clear()
    yield
    check_arrow_driver.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("version", ["1.7.0", "1.12.0"])
def test_an_arrow_driver_that_writes_wrong_values_reads_and_writes_nothing(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", {ARROW_DRIVER: version}.__getitem__)
    told = rf"adbc-driver-postgresql {version} is installed .*`pip install 'adbc-driver-postgresql>=1\.13'"
    rows = Rows("public.some", ("id",))
    with pytest.raises(VersionsDiffer, match=told):
        arrow.read_whole("dbname=nowhere", "select 1", (), pa.schema([]), rows=rows)
    with pytest.raises(VersionsDiffer, match=told):
        arrow.write("dbname=nowhere", "some", 1, iter([pa.RecordBatch.from_pydict({"id": [1]})]), rows=rows)
