"""DuckDB as a reader of lake tables. It shares no code with the writer, and has its own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.spark import clean_environment

VERSION = "1.5.5"
"""The last DuckDB whose Iceberg extension is on PyPI."""
ICEBERG, DELTA = ("avro", "httpfs", "iceberg"), ("httpfs", "delta")
"""Extensions of DuckDB."""
READING = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
import duckdb

query, location, setup, *extensions = sys.argv[1:]
connection = duckdb.connect()
for name in extensions:
    folder = Path(find_spec(f"duckdb_extension_{name}").origin).parent
    (extension,) = folder.rglob("*.duckdb_extension")
    connection.execute(f"load '{extension}'")
connection.execute(setup)
print(json.dumps(connection.execute(query, [location]).fetchall()))
"""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def read(
    query: str, location: str, *, extensions: Sequence[str] = ICEBERG, setup: str = "select 1"
) -> list[Any]:
    """Return the rows of a query that reads a table, such as ``select id from iceberg_scan(?)``.

    ``location`` is the metadata file of an Iceberg table, or the location of a Delta table. ``setup`` is a statement that
    runs first.
    """
    uv = Path(sys.executable).parent / "uv"
    names = ["duckdb", *(f"duckdb-extension-{name}" for name in extensions)]
    packages = [option for name in names for option in ("--with", f"{name}=={VERSION}")]
    # By default uv trusts only its bundled certificates.
    certificates = {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    command = ["python", "-c", READING, query, location, setup, *extensions]
    ran = subprocess.run(
        [uv, "run", "--quiet", "--no-project", "--isolated", *packages, *command],
        env={**certificates, **clean_environment()},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[Any] = json.loads(ran.stdout)
    return rows
