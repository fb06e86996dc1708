"""The errors of optional parts if their packages are missing."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from importlib import metadata

import pyarrow as pa
import pytest

from airflow_pgchange.errors import ExtraMissing, VersionsDiffer
from airflow_pgchange.spark import adbc
from airflow_pgchange.spark.entry_point import batch_job
from airflow_pgchange.spark.installed_versions import (
    ARROW_DRIVER,
    TESTED_PAIRS,
    check_arrow_driver,
    check_pair,
    check_versions,
    sends_rows,
)
from airflow_pgchange.spark.poison_batch import is_of_the_content
from airflow_pgchange.spark.unsupported_values import Rows
from tests.extras import EXTRAS
from tests.readme import table


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("airflow_pgchange.events.http", "fastapi", "http"),
        ("airflow_pgchange.events.webhooks", "httpcore", "http"),
        ("airflow_pgchange.events.webhooks", "standardwebhooks", "http"),
        ("airflow_pgchange.lake.delta", "deltalake", "delta"),
        ("airflow_pgchange.lake.iceberg", "pyiceberg", "iceberg"),
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


@pytest.mark.parametrize(("kind", "package"), [("iceberg", "pyiceberg"), ("delta", "deltalake")])
def test_an_executor_without_the_library_of_a_lake_is_noticed_before_it_writes_a_file(
    kind, package, monkeypatch
):
    """A Spark task gets the place of the lake's table as a pickle."""
    writer = importlib.import_module(f"airflow_pgchange.lake.{kind}.file_writer")
    sent = pickle.dumps(writer.FileWriter)
    for module in [name for name in sys.modules if name.startswith(f"airflow_pgchange.lake.{kind}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ExtraMissing, match=rf"need {package}: pip install.* An executor of Spark needs"
    ) as raised:
        pickle.loads(sent)
    # The driver gets only the text of the error. The error must not count as an error of the batch, which could give
    # the batch up.
    assert not is_of_the_content(RuntimeError(f"ExtraMissing: {raised.value}"))


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in ("pyspark", "pyarrow", "adbc_driver_postgresql", "adbc_driver_manager", "pandas",
             "airflow.providers.apache.spark.hooks", "airflow.providers.apache.spark.operators",
             "openlineage", "deltalake", "pyiceberg", "fastapi.routing", "httpcore", "standardwebhooks"):
    sys.modules[name] = None
import airflow_pgchange
from airflow_pgchange.errors import ExtraMissing

plugin, entry = "airflow_pgchange.plugins.", "airflow_pgchange.plugins.pgchange"
# Airflow's own program needs fastapi in some versions, so ours does.
program = "airflow_pgchange.cli.program"
for module in pkgutil.walk_packages(airflow_pgchange.__path__, "airflow_pgchange.", lambda name: None):
    # The rest of the plugin is imported by the API server alone, which has all that it needs.
    if module.name == program or module.name.startswith(plugin) and module.name != entry:
        continue
    try:
        importlib.import_module(module.name)
    except ExtraMissing:
        print(module.name)
"""


def test_only_what_needs_an_extra_is_refused_without_extras():
    """Takes seconds: a new process imports the whole package."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) == set().union(*EXTRAS.values())


def spark_of(tmp_path, monkeypatch, package, files):
    """Return an environment whose Spark has the Java classes of one version and the Python files of another version."""
    info = tmp_path / f"pyspark-{package}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pyspark\nVersion: {package}\n")
    if files is not None:
        (tmp_path / "pyspark").mkdir()
        (tmp_path / "pyspark" / "version.py").write_text(f"# One line\n__version__: str = '{files}'\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))


def test_python_files_of_another_spark_than_its_java_classes_are_told_before_a_job_begins(
    tmp_path, monkeypatch
):
    spark_of(tmp_path, monkeypatch, "4.3.0", "4.2.1")
    with (
        pytest.raises(
            VersionsDiffer, match=r"pyspark 4\.3\.0 is installed, but its Python files are of 4\.2\.1"
        ) as told,
        batch_job(),
    ):
        pass
    assert "`pip install --force-reinstall --no-deps pyspark==4.3.0`" in str(told.value)


@pytest.mark.parametrize(("package", "files"), [("4.3.0", "4.3.0"), ("4.2.1", "4.2.0"), ("4.2.1", None)])
def test_python_files_of_the_same_minor_version_fit(package, files, tmp_path, monkeypatch):
    spark_of(tmp_path, monkeypatch, package, files)
    check_versions()


def test_a_client_without_java_classes_is_left_alone(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    check_versions()


@pytest.mark.parametrize(("client", "remote"), [("3.5.1", "4.2.0"), ("4.2.0", "3.5.9")])
def test_a_connect_client_or_server_without_python_data_sources_is_refused(client, remote):
    with pytest.raises(VersionsDiffer, match=f"server has version {remote} and pyspark here {client}"):
        check_pair(client, remote)


@pytest.mark.parametrize(
    ("client", "remote", "warned"),
    [("4.2.0", "4.2.9", False), ("4.2.0", "4.9.0", True), ("4.2.0", "17.1", True)],
)
def test_a_connect_client_and_server_that_were_not_tested_together_give_a_warning(
    client, remote, warned, caplog
):
    check_pair(client, remote)
    assert ("This pair was not tested" in caplog.text) is warned


@pytest.mark.parametrize(
    ("client", "remote", "sends"),
    [
        ("4.0.5", "4.0.4", True),
        ("4.0.5", "4.2.1", True),
        ("4.2.0", "4.1.4", False),
        ("4.1.4", "4.0.5", False),
    ],
)
def test_a_client_sends_no_rows_to_an_older_server(client, remote, sends):
    assert sends_rows(client, remote) is sends


def test_the_guide_lists_the_pairs_that_were_tested():
    rows = table("docs/how-to/spark.md", "### Versions of client and server")
    assert {(client, server) for client, servers in rows for server in servers.split(", ")} == TESTED_PAIRS


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
        adbc.read_whole("dbname=nowhere", "select 1", (), pa.schema([]), rows=rows)
    with pytest.raises(VersionsDiffer, match=told):
        adbc.write("dbname=nowhere", "some", 1, iter([pa.RecordBatch.from_pydict({"id": [1]})]), rows=rows)
