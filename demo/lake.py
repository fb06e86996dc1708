"""The lake of the demo: an Iceberg table whose catalog is in the demo's database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange import CommitFeed
from demo.duckdb_reader import read

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
    sums = _only(read(f"select {SUMS} from iceberg_scan(?)", location))
    return sums[0], tuple(sums) == expected


def _only(rows: list[Any]) -> Any:
    (row,) = rows
    return row
