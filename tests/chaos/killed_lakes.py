"""Tables of a lake, a table for each guarantee. The application of a killed batch copies the ids of the ledger into
them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import psycopg
import pyarrow as pa
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake import Delta, Iceberg, RemoteIceberg, write
from airflow_pgchange.lake.tables import LakeTable
from demo.duckdb_reader import read
from tests.lakes import Lake

COPIED = pa.schema([("id", pa.int64())])


def tables(folder: Path) -> tuple[LakeTable, ...]:
    return (
        Iceberg("sales.copied", "lake"),
        RemoteIceberg("sales.copied", "company"),
        Delta(str(folder / "delta")),
    )


def properties(folder: Path) -> dict[str, str]:
    """Return the properties of a catalog outside of PostgreSQL."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder / 'company.db'}",
        "warehouse": (folder / "company").as_uri(),
    }


def environment(folder: Path) -> Mapping[str, str]:
    """Return the environment variables by which PyIceberg finds that catalog."""
    return {
        f"PYICEBERG_CATALOG__COMPANY__{name.upper()}": value for name, value in properties(folder).items()
    }


def create(results: str, folder: Path) -> None:
    Lake(results, folder / "lake").table(COPIED, "copied")
    company = load_catalog("company", **properties(folder))
    company.create_namespace("sales")
    company.create_table("sales.copied", COPIED)
    DeltaTable.create(str(folder / "delta"), COPIED)


def append(connection: psycopg.Connection[object], batch: Batch, folder: Path, ids: list[int]) -> None:
    with patch.dict(os.environ, environment(folder)):
        for table in tables(folder):
            write(connection, batch, table, pa.table({"id": ids}, COPIED))


def ids(results: str, folder: Path) -> Mapping[str, Counter[int]]:
    """Return how often each id is in each table, read by other programs than the writer: DuckDB, and ``deltalake``."""
    query = "select id from iceberg_scan(?)"
    with psycopg.connect(results) as connection:
        row = connection.execute("select metadata_location from iceberg_tables").fetchone()
    assert row is not None
    company = load_catalog("company", **properties(folder)).load_table("sales.copied").metadata_location
    delta = pa.table(DeltaTable(str(folder / "delta")).to_pyarrow_table())
    return {
        "Iceberg": Counter(id_ for (id_,) in read(query, row[0])),
        "RemoteIceberg": Counter(id_ for (id_,) in read(query, company)),
        "Delta": Counter(delta.column("id").to_pylist()),
    }
