"""The pointer of an Iceberg table: the row of a SQL catalog that names the table's current metadata file.

A commit to the table writes a new metadata file and moves the pointer to it. Here the pointer is moved on the connection
of the consumer transaction. So readers see the new snapshot when PostgreSQL commits, and never if it rolls back.

The columns are those that the Iceberg project publishes for its JDBC catalog, in the versions V0 and V1. V1 has one more
column, ``iceberg_type``, which tells tables from views.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import psycopg
from psycopg import errors, sql
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.serializers import FromInputFile, ToOutputFile
from pyiceberg.table import CommitTableResponse, Table, TableProperties
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableRequirement, TableUpdate, update_table_metadata
from pyiceberg.utils.config import Config

from airflow_pgchange.errors import InvalidArgument, PermissionDenied, Refused, ServerUnavailable
from airflow_pgchange.feeds.error_text import described
from airflow_pgchange.feeds.grants import identifier
from airflow_pgchange.feeds.watched_connection import role_of
from airflow_pgchange.lake.commit_numbers import metadata_number
from airflow_pgchange.lake.iceberg.file_names import metadata_name
from airflow_pgchange.lake.tables import Iceberg, RemoteIceberg


def opened(connection: psycopg.Connection[Any], lake: Iceberg, *, locked: bool = False) -> Table:
    """Return the table at its current snapshot.

    ``locked``: no other transaction moves the pointer until this transaction ends, so the snapshot stays current.
    Raises InvalidArgument if the catalog has no such table, and PermissionDenied if the role may not read or lock the
    pointer.
    """
    query = sql.SQL(
        "select t.metadata_location from {} as t "
        "where {} and coalesce(to_jsonb(t) ->> 'iceberg_type', 'TABLE') = 'TABLE' {}"
    ).format(lake.pointers, _is_it(lake), sql.SQL("for update" if locked else ""))
    try:
        row = connection.execute(query).fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
        raise InvalidArgument(
            f"{lake}: the database of the results has no catalog (a table iceberg_tables) in schema {lake.schema}. "
            f"Let PyIceberg's SqlCatalog, or the JdbcCatalog of Spark, create it there"
        ) from error
    except errors.InsufficientPrivilege as error:
        role = identifier(role_of(connection))
        raise PermissionDenied(
            f"{lake}: {error.diag.message_primary}:\nlet the owner of the catalog run: grant usage on schema "
            f"{lake.schema} to {role}; grant select, update on {lake.schema}.iceberg_tables to {role}"
        ) from error
    if row is None or row[0] is None:
        raise InvalidArgument(
            f"{lake}: the catalog {lake.catalog} in schema {lake.schema} has no table {lake.table}: make it first, or "
            f"correct the name; {lake.schema}.iceberg_tables has {_named_tables(connection, lake)}"
        )
    return _table(connection, lake, row[0])


def files_of(settings: Mapping[str, Any], location: str) -> FileIO:
    """Return the access to files by the settings of a catalog.

    PyIceberg adds the properties of the table. Here they are ignored, because another role may have written them:
    they could name Python code to run, or send the secrets of the settings to another server.
    """
    return load_file_io(dict(settings), location)


def check_runs_no_code(lake: Iceberg | RemoteIceberg, metadata: TableMetadata) -> None:
    """Raise InvalidArgument if a property of the table names Python code, which PyIceberg would run for each file."""
    name = TableProperties.WRITE_PY_LOCATION_PROVIDER_IMPL
    if name in metadata.properties:
        raise InvalidArgument(
            f"{lake}: the property {name} of the table names Python code, {metadata.properties[name]!r}, which PyIceberg "
            "would run with the rights of this process: remove the property"
        )


def properties(lake: Iceberg | RemoteIceberg) -> Mapping[str, Any]:
    """Return PyIceberg's configuration of the catalog. It may have secrets. Raises InvalidArgument if it is malformed."""
    try:
        return cast(Mapping[str, Any], Config().get_catalog_config(lake.catalog) or {})
    except Exception as error:  # noqa: BLE001
        # The cause is left out, because its text may have the secrets.
        raise InvalidArgument(
            f"{lake}: PyIceberg's configuration cannot be read: {described(error)}: correct .pyiceberg.yaml, or the "
            "environment variables that begin with PYICEBERG_"
        ) from None


class Pointer(NoopCatalog):
    """The catalog of one table, for its commit alone.

    It expects the pointer to be locked, so no other commit can come between.
    """

    def __init__(self, connection: psycopg.Connection[Any], lake: Iceberg) -> None:
        super().__init__(lake.catalog)
        self._connection = connection
        self._lake = lake

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Write the table's next metadata file and move the pointer to it. Readers see it once PostgreSQL commits."""
        for requirement in requirements:
            requirement.validate(table.metadata)
        metadata = update_table_metadata(table.metadata, updates, metadata_location=table.metadata_location)
        locations = load_location_provider(metadata.location, metadata.properties)
        number = metadata_number(
            self._connection, str(metadata.table_uuid), version_of(table.metadata_location) + 1
        )
        location = locations.new_metadata_location(metadata_name(metadata, number))
        ToOutputFile.table_metadata(metadata, table.io.new_output(location))
        moved = self._connection.execute(
            sql.SQL(
                "update {table} set metadata_location = {location}, previous_metadata_location = {before} "
                "where {is_it} and metadata_location = {before}"
            ).format(
                table=self._lake.pointers,
                is_it=_is_it(self._lake),
                location=location,
                before=table.metadata_location,
            )
        )
        if moved.rowcount != 1:
            raise Refused(
                f"{self._lake}: the row of the table in {self._lake.schema}.iceberg_tables was not updated, possibly "
                f"because of a trigger or a rule. Nothing was written; let the role of the results update it"
            )
        return CommitTableResponse.model_validate({"metadata": metadata, "metadata-location": location})

    @staticmethod
    def _delete_old_metadata(io: FileIO, base: TableMetadata, metadata: TableMetadata) -> None:
        """Delete nothing: PyIceberg calls this after its commit, and here PostgreSQL commits later, or never."""


def version_of(metadata_location: str) -> int:
    """Return the number with which the name of a metadata file begins, or -1."""
    match = re.match(r"(\d+)-", metadata_location.rpartition("/")[2])
    return int(match[1]) if match else -1


def _table(connection: psycopg.Connection[Any], lake: Iceberg, location: str) -> Table:
    settings = properties(lake)
    files = files_of(settings, location)
    try:
        metadata = FromInputFile.table_metadata(files.new_input(location))
    except FileNotFoundError as error:
        raise ServerUnavailable(
            f"{lake}: the metadata file {location}, which the catalog names, does not exist. If the warehouse is a "
            f"folder, this machine must reach it under the same path"
        ) from error
    check_runs_no_code(lake, metadata)
    return Table(
        identifier=(*lake.namespace.split("."), lake.name),
        metadata=metadata,
        metadata_location=location,
        io=files,
        catalog=Pointer(connection, lake),
    )


def _named_tables(connection: psycopg.Connection[Any], lake: Iceberg) -> str:
    """Name some tables that ``iceberg_tables`` has, each with its catalog."""
    query = "select concat_ws('.', catalog_name, table_namespace, table_name) from {} order by 1 limit 5"
    rows = connection.execute(sql.SQL(query).format(lake.pointers)).fetchall()
    return ", ".join(name for (name,) in rows) or "no table"


def _is_it(lake: Iceberg) -> sql.Composed:
    """Return the condition on the row of one table. Values are literals, because psycopg would take a percent sign in a
    name for a parameter."""
    return sql.SQL("catalog_name = {} and table_namespace = {} and table_name = {}").format(
        lake.catalog, lake.namespace, lake.name
    )
