"""Whether rows fit an Iceberg table, asked before a file is written."""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.io.pyarrow import _check_pyarrow_schema_compatible
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import DoubleType, FloatType, PrimitiveType

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake.tables import Iceberg
from airflow_pgchange.results.modes import Mode


def check(lake: Iceberg, metadata: TableMetadata, rows: pa.Schema, key: tuple[str, ...], mode: Mode) -> None:
    """Raise MergeRefused if rows of this schema cannot be written in this mode exactly as they are."""
    if mode.behaviour.sums:
        raise MergeRefused(
            f"{lake}: mode {mode} changes rows by sums, for which the files of an Iceberg table would be read and "
            "written anew: append the sums of each batch and add them up in a query, or replace whole rows"
        )
    written_as = metadata.properties.get(TableProperties.WRITE_FILE_FORMAT, "parquet")
    if written_as.lower() != "parquet":
        raise MergeRefused(
            f"{lake}: the table wants its files as {written_as}, and only Parquet is written: set the property "
            f"{TableProperties.WRITE_FILE_FORMAT} to parquet"
        )
    try:
        _check_pyarrow_schema_compatible(metadata.schema(), rows, format_version=metadata.format_version)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise MergeRefused(f"{lake}: the rows do not fit the table: {error}") from error
    if mode.behaviour.needs_key:
        _check_key(lake, metadata, rows, key, mode)


def _check_key(
    lake: Iceberg, metadata: TableMetadata, rows: pa.Schema, key: tuple[str, ...], mode: Mode
) -> None:
    if not key:
        raise MergeRefused(f"{lake}: mode {mode} finds rows by their key: give key=")
    for name in key:
        if name not in rows.names:
            raise MergeRefused(f"{lake}: the key {name!r} is none of the columns {', '.join(rows.names)}")
        kind = metadata.schema().find_type(name)
        if not isinstance(kind, PrimitiveType) or isinstance(kind, FloatType | DoubleType):
            raise MergeRefused(
                f"{lake}: the column {name!r} is of type {kind}, by which no row can be found: choose another key"
            )
