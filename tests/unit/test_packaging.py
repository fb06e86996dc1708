"""The wheel, the source distribution and a checkout each carry the SQL, and the page; both PySpark packages are of one
version."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds.argument_checks import OLDEST_SPARK
from airflow_pgchange.provider_info import GUIDES
from airflow_pgchange.spark.installed_versions import ARROW_DRIVER, OLDEST_ARROW_DRIVER
from airflow_pgchange.spark.package import EXECUTOR_PACKAGES

ROOT = Path(__file__).parents[2]
PAGE = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "airflow_pgchange/plugins/page").glob("*.*")
)
EXAMPLES = sorted(
    path.relative_to(ROOT / "dags").as_posix()
    for path in (ROOT / "dags").rglob("*")
    if path.suffix in (".py", ".sh")
)
SQL = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "sql").rglob("*.sql"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT],
        check=True,
        capture_output=True,
    )
    return target


def test_the_wheel_carries_the_sql_the_page_its_guides_and_the_examples_inside_the_package(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {f"airflow_pgchange/{name}" for name in SQL} <= names
        assert set(PAGE) <= names
        assert {f"airflow_pgchange/guides/{name}.md" for name in GUIDES} <= names
        assert {f"airflow_pgchange/example_dags/{name}" for name in EXAMPLES} <= names
        archive.extractall(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", "from airflow_pgchange.admin import versions; print(versions.sql_folder())"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert Path(found.stdout.strip()) == tmp_path / "airflow_pgchange" / "sql"


def test_the_source_distribution_carries_the_sql_the_example_dags_and_the_texts_for_readers(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert set(SQL) <= names
    assert {f"dags/{name}" for name in EXAMPLES} <= names
    assert {f"airflow_pgchange/example_dags/{name}" for name in EXAMPLES} <= names
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= names


def test_a_checkout_finds_the_sql():
    assert versions.sql_folder() == ROOT / "sql"
    assert all(versions.scripts(system) for system in versions.SYSTEMS)


def test_the_entry_point_is_declared():
    (entry,) = (
        point for point in metadata.entry_points(group="apache_airflow_provider") if "pgchange" in point.value
    )
    assert entry.load()()["package-name"] == "airflow-provider-pgchange"


def test_pyspark_and_pyspark_client_hold_identical_files():
    full, client = metadata.distribution("pyspark"), metadata.distribution("pyspark-client")
    assert full.version == client.version
    recorded = {str(file): file.hash.value for file in full.files or () if file.hash and file.suffix == ".py"}
    shared = {str(file): file.hash.value for file in client.files or () if file.hash and file.suffix == ".py"}
    common = recorded.keys() & shared.keys()
    assert len(common) > 300
    assert {name for name in common if recorded[name] != shared[name]} == set()


def test_the_description_has_no_link_that_leads_nowhere_on_a_package_index(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (described,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(described).decode()
    assert "# airflow_pgchange" in description
    assert re.findall(r"\]\((?!https?:)[^)]*\)", description) == []


def test_the_constraints_pin_every_package_without_an_address():
    lines = (ROOT / "constraints.txt").read_text().split()
    assert all("==" in line and "://" not in line for line in lines)


def test_the_oldest_psycopg_that_is_taken_is_the_one_that_is_tested():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (need.split(">=")[1] for need in needs if need.startswith("psycopg["))
    assert f"psycopg=={floor}" in (ROOT / "constraints.txt").read_text().split()


def test_the_oldest_arrow_driver_that_pip_takes_is_the_oldest_that_writes_what_it_is_given():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(need) for need in project["optional-dependencies"]["spark-connect"]]
    (floor,) = (str(need.specifier) for need in needed if need.name == ARROW_DRIVER)
    assert floor == f">={OLDEST_ARROW_DRIVER}"
    assert f"{ARROW_DRIVER}{floor}" in EXECUTOR_PACKAGES


def test_both_packages_of_spark_take_the_same_oldest_version_and_only_extras_need_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {
        need.name: need.specifier for need in map(Requirement, (*extras["spark"], *extras["spark-connect"]))
    }
    oldest = ".".join(map(str, OLDEST_SPARK))
    assert all(f">={oldest}" in str(needed[name]) for name in ("pyspark", "pyspark-client"))
    assert needed["pyspark-client"].contains(metadata.version("pyspark-client"))
    assert needed.keys().isdisjoint(Requirement(need).name for need in project["dependencies"])


def test_no_file_is_installed_that_differs_from_both_wheels():
    full = metadata.distribution("pyspark")
    wrong = []
    for file in full.files or ():
        if file.hash and str(file).startswith("pyspark/sql/datasource"):
            digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                wrong.append(str(file))
    assert wrong == []
