"""A SQL catalog of Iceberg without SQLAlchemy, for a Python in which PyIceberg's own cannot be imported.

PyIceberg's SqlCatalog needs SQLAlchemy 2. Beside Airflow 3.1 there can be SQLAlchemy 1.4.
"""

from __future__ import annotations

from typing import Any

import psycopg
from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse, Table

TABLES = """
create table if not exists iceberg_tables (
    catalog_name varchar(255), table_namespace varchar(255), table_name varchar(255),
    metadata_location varchar(1000), previous_metadata_location varchar(1000), iceberg_type varchar(5),
    primary key (catalog_name, table_namespace, table_name)
)
"""
"""The table that the Iceberg project publishes for its JDBC catalog, in its version V1."""
OF_TABLE = "where (catalog_name, table_namespace, table_name) = (%s, %s, %s)"


class PlainCatalog(NoopCatalog, MetastoreCatalog):
    """A catalog that creates, loads and drops tables, and commits to them."""

    def __init__(self, name: str, conninfo: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._conninfo = conninfo
        self._execute(TABLES)

    def create_table(self, identifier: str, schema: Any, *_: Any, **options: Any) -> Table:
        location = f"{self.properties['warehouse']}/{identifier.replace('.', '/')}"
        staged = self._create_staged_table(identifier, schema, location, **options)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        row = (*self._named(identifier), staged.metadata_location)
        self._execute("insert into iceberg_tables values (%s, %s, %s, %s, null, 'TABLE')", row)
        return self.load_table(identifier)

    def load_table(self, identifier: Any) -> Table:
        ((location,),) = self._execute(
            f"select metadata_location from iceberg_tables {OF_TABLE}", self._named(identifier)
        )
        metadata = FromInputFile.table_metadata(self._load_file_io({}, location).new_input(location))
        names = tuple(self._named(identifier)[1:])
        return Table(names, metadata, location, self._load_file_io(metadata.properties, location), self)

    def drop_table(self, identifier: Any) -> None:
        self._execute(f"delete from iceberg_tables {OF_TABLE}", self._named(identifier))

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        now = self.load_table(table.name())
        staged = self._update_and_stage_table(now, table.name(), requirements, updates)
        self._write_metadata(staged.metadata, staged.io, staged.metadata_location)
        places = (staged.metadata_location, now.metadata_location)
        moved = self._execute(
            "update iceberg_tables set metadata_location = %s, previous_metadata_location = %s"
            f" {OF_TABLE} and metadata_location = %s returning true",
            (*places, *self._named(table.name()), now.metadata_location),
        )
        if not moved:
            raise CommitFailedException("another writer has committed first")
        return CommitTableResponse(metadata=staged.metadata, metadata_location=staged.metadata_location)

    def _named(self, identifier: Any) -> tuple[str, str, str]:
        return (self.name, *self.identifier_to_database_and_table(identifier))

    def _execute(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with psycopg.connect(self._conninfo) as connection:
            cursor = connection.execute(query, values)  # type: ignore[call-overload]
            return list(cursor) if cursor.description else []
