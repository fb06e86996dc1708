"""The lake of the demo: an Iceberg table whose catalog is in the demo's database, and a reader that is not its writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange import CommitFeed
from demo.spark import clean_environment

FEED = CommitFeed(consumer="lake", branch=0)
DAG = "movements_in_lake"
SUMS = "count(*), count(distinct id), coalesce(sum(id), 0)::bigint, coalesce(sum(delay), 0)::bigint"
MOVEMENTS = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("kind", pa.string()),
        pa.field("flight_date", pa.date32()),
        pa.field("carrier", pa.string()),
        pa.field("flight", pa.int32()),
        pa.field("origin", pa.string()),
        pa.field("dest", pa.string()),
        pa.field("at", pa.timestamp("us")),
        pa.field("delay", pa.int32()),
    ]
)
READER = ("duckdb==1.5.5", "duckdb-extension-avro==1.5.5", "duckdb-extension-iceberg==1.5.5")
"""The last DuckDB whose Iceberg extension is on PyPI. It has an environment of its own."""
READING = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
import duckdb

connection = duckdb.connect()
for name in ("avro", "iceberg"):
    folder = Path(find_spec(f"duckdb_extension_{name}").origin).parent
    (extension,) = folder.rglob("*.duckdb_extension")
    connection.execute(f"load '{extension}'")
query, location = sys.argv[1:]
print(json.dumps(connection.execute(query, [location]).fetchall()))
"""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def create(database: str, folder: Path) -> None:
    """Create the catalog ``lake`` in a database, and its table ``flights.movement`` with files in a folder."""
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415

    server = conninfo_to_dict(database)
    password = f":{server['password']}" if server.get("password") else ""
    address = f"{server['user']}{password}@{server['host']}:{server['port']}/{server['dbname']}"
    catalog = SqlCatalog("lake", uri=f"postgresql+psycopg://{address}", warehouse=folder.as_uri())
    catalog.create_namespace("flights")
    catalog.create_table("flights.movement", MOVEMENTS)
    catalog.engine.dispose()


def compare(database: str) -> tuple[int, bool]:
    """Return the number of rows in the lake, and whether they are those of the table ``movement``, each once."""
    with psycopg.connect(database, autocommit=True) as connection:
        (location,) = _only(connection.execute("select metadata_location from iceberg_tables").fetchall())
        expected = _only(connection.execute(f"select {SUMS} from public.movement").fetchall())
    found = _only(read(f"select {SUMS} from iceberg_scan(?)", location))
    return found[0], tuple(found) == expected


def read(query: str, location: str) -> list[Any]:
    """Return the rows of a query with ``iceberg_scan(?)``, by DuckDB, of the table with this metadata file."""
    uv = Path(sys.executable).parent / "uv"
    packages = [option for name in READER for option in ("--with", name)]
    # uv by itself trusts only the certificates that it brings.
    settings = {"SSL_CERT_FILE": str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    ran = subprocess.run(
        [
            uv,
            "run",
            "--quiet",
            "--no-project",
            "--isolated",
            *packages,
            "python",
            "-c",
            READING,
            query,
            location,
        ],
        env={**settings, **clean_environment(), **_given("SSL_CERT_FILE")},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[Any] = json.loads(ran.stdout)
    return rows


def _given(name: str) -> dict[str, str]:
    return {name: os.environ[name]} if name in os.environ else {}


def _only(rows: list[Any]) -> Any:
    (row,) = rows
    return row
