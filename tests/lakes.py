"""Iceberg tables that PyIceberg's own catalog creates and reads, because users' tables also come from other programs.

That catalog needs SQLAlchemy 2. With an older SQLAlchemy the tests use ``PlainCatalog``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table

from airflow_pgchange.lake import Iceberg
from tests.plain_catalog import PlainCatalog

HAS_SQL_CATALOG = not version("sqlalchemy").startswith("1.")

PAYMENTS = pa.schema([("id", pa.int64()), ("account", pa.string()), ("cents", pa.int32())])


@dataclass(frozen=True)
class Lake:
    """A catalog in a database, and a folder, or the address of a bucket, for the files of its tables."""

    conninfo: str
    folder: Path | str
    settings: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def catalog(self) -> Catalog:
        place = self.folder if isinstance(self.folder, str) else self.folder.as_uri()
        if not HAS_SQL_CATALOG:
            return PlainCatalog("lake", self.conninfo, warehouse=place, **self.settings)
        from pyiceberg.catalog.sql import SqlCatalog

        server = conninfo_to_dict(self.conninfo)
        address = f"{server['user']}@{server['host']}:{server['port']}/{server['dbname']}"
        catalog = SqlCatalog("lake", uri=f"postgresql+psycopg://{address}", warehouse=place, **self.settings)
        catalog.create_namespace_if_not_exists("sales")
        return catalog

    def table(self, schema: pa.Schema = PAYMENTS, name: str = "payment", **options) -> Table:
        return self.catalog.create_table(f"sales.{name}", schema, **options)

    def rows(self, name: str = "payment") -> list[dict]:
        found = self.catalog.load_table(f"sales.{name}").scan().to_arrow()
        return found.sort_by([(column, "ascending") for column in found.column_names[:1]]).to_pylist()

    @property
    def into(self) -> Iceberg:
        return TABLE

    def batches(self) -> list[str]:
        """Return the ids of the batches that the table's snapshots record."""
        return [
            snapshot.summary["pgchange.batch"]
            for snapshot in self.catalog.load_table(TABLE.table).snapshots()
            if snapshot.summary
        ]


TABLE = Iceberg("sales.payment", "lake")
EACH_STORE = pytest.mark.parametrize("lake", ["local files", "S3"], indirect=True)
"""Tests with this mark run with local files and with an S3 server; other tests that use ``lake`` only with local
files."""


def payments(*rows: tuple[int, str | None, int], schema: pa.Schema = PAYMENTS) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def set_up(conninfo: str) -> None:
    """Create and track a table with ten changes."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("create table change (id bigint generated always as identity primary key)")
        connection.execute("select revision.track('change', branch_id => '0')")
        connection.execute("insert into change select from generate_series(1, 10)")
