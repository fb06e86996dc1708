"""Add the columns that rows have and an Iceberg table lacks."""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.table import Table

from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.lake.iceberg import schema_check
from airflow_pgchange.lake.iceberg.error_translation import refusals
from airflow_pgchange.lake.rows import normalised_schema
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge_modes import Mode


def lacking(table: Table, rows: pa.Schema) -> list[str]:
    """Return the columns that rows have and the table lacks. Names that differ only in case are the same column in
    Spark."""
    lowered = {field.name.lower() for field in table.schema().fields}
    return [name for name in rows.names if name.lower() not in lowered]


def add_columns(
    lake: LakeTable, table: Table, rows: pa.Schema, key: tuple[str, ...], mode: Mode
) -> list[str]:
    """Add the columns that the table lacks, each of which may be null, and return their names.

    Raises MergeRefused, and the table stays as it is, if the rows would still not fit it.
    """
    names, schema = lacking(table, rows), normalised_schema(rows)
    transaction = table.transaction()
    with refusals(lake), transaction.update_schema() as update:
        added = pa.schema([schema.field(name) for name in names])
        for field in _pyarrow_to_schema_without_ids(added, format_version=table.format_version).fields:
            update.add_column((field.name,), field.field_type)
    schema_check.check(lake, transaction.table_metadata, schema, key, mode)
    try:
        transaction.commit_transaction()
    except CommitFailedException as error:
        raise ConsumerBusy(
            f"{lake}: another writer changed the table while columns were added to it: nothing was changed, and the "
            "batch is tried again"
        ) from error
    return names
