"""Check that a batch can be written into a Delta table, before a file is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
from deltalake import DeltaTable, Schema

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake import keys
from airflow_pgchange.lake.delta import object_store
from airflow_pgchange.lake.delta.data_files import Layout
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.schema_mismatch import another_type, missing, no_columns, refusal
from airflow_pgchange.lake.tables import Delta
from airflow_pgchange.results.merge_modes import Mode

KNOWN = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "variantType",
    }
)
"""The writer features that a table may list. Whether it uses them is checked for each."""
OF_COLUMNS = {
    "delta.generationExpression": "a generated column",
    "delta.identity.": "an identity column",
    "delta.invariants": "a column with an invariant",
    "delta.columnMapping.": "column mapping",
}


def layout(lake: Delta, table: DeltaTable, attempt: Attempt) -> Layout:
    """Return what an attempt needs to write files of the table."""
    metadata, protocol = table.metadata(), table.protocol()
    declared = [
        metadata.id,
        table.schema().to_json(),
        metadata.partition_columns,
        sorted(metadata.configuration.items()),
        sorted(protocol.writer_features or ()),
        protocol.min_writer_version,
    ]
    return Layout(
        attempt,
        lake.location,
        object_store.options(lake),
        pa.schema(table.schema().to_arrow()),
        tuple(metadata.partition_columns),
        hashlib.sha256(json.dumps(declared).encode()).hexdigest()[:32],
    )


def check_table(lake: Delta, table: DeltaTable, mode: Mode) -> None:
    """Raise MergeRefused if the table uses a feature that this mode does not support."""
    if in_use := next(_in_use(table, mode), None):
        raise MergeRefused(f"{lake}: the table has {in_use}, so it cannot be written in mode {mode}")


def check_rows(
    lake: Delta,
    table: DeltaTable,
    rows: pa.Schema,
    key: tuple[str, ...],
    mode: Mode,
    *,
    added: Sequence[pa.Field] = (),
) -> None:
    """Raise MergeRefused if rows of this schema cannot be written in this mode exactly as they are.

    ``added`` are columns that the table does not have yet.
    """
    keys.check_mode(lake, rows, key, mode)
    columns = pa.schema([*pa.schema(table.schema().to_arrow()), *added])
    _check_columns(lake, columns, table.metadata().partition_columns, rows)
    if mode.behaviour.needs_key:
        _check_key(lake, rows, key)


def _in_use(table: DeltaTable, mode: Mode) -> Iterator[str]:
    """Return the features and properties of the table that this package does not support for writing."""
    protocol, settings, schema = (
        table.protocol(),
        table.metadata().configuration,
        table.schema().to_json(),
    )
    if unknown := sorted(set(protocol.writer_features or ()) - KNOWN):
        yield f"the feature {unknown[0]}"
    yield from (name for sign, name in OF_COLUMNS.items() if f'"{sign}' in schema)
    if settings.get("delta.columnMapping.mode", "none") != "none":
        yield "column mapping"
    if any(name.startswith("delta.constraints.") for name in settings):
        yield "a constraint"
    if "delta.setTransactionRetentionDuration" in settings:
        yield (
            "the property delta.setTransactionRetentionDuration, by which it forgets batches that it has "
            "(ALTER TABLE ... UNSET TBLPROPERTIES removes it)"
        )
    if mode.behaviour.needs_key:
        yield from (
            f"the property {name}"
            for name in ("delta.appendOnly", "delta.enableChangeDataFeed")
            if settings.get(name) == "true"
        )
        if "deletionVectors" in (protocol.reader_features or ()):
            yield "deletion vectors"


def _check_columns(lake: Delta, columns: pa.Schema, partitioning: list[str], rows: pa.Schema) -> None:
    if mismatches := list(_mismatches(columns, rows)):
        raise refusal(lake, mismatches)
    for name in partitioning:
        kind = columns.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_binary(kind):
            raise MergeRefused(
                f"{lake}: the column {name!r} partitions the table and is of type {kind}, whose values Delta's log "
                "cannot hold exactly: partition the table by another column"
            )


def _mismatches(columns: pa.Schema, rows: pa.Schema) -> Iterator[str]:
    """Yield, for each column that does not fit, the reason."""
    if more := [name for name in rows.names if name not in columns.names]:
        yield no_columns(more, columns.names)
        return
    for field in columns:
        if field.name not in rows.names:
            if not field.nullable:
                yield missing(field.name)
        elif (kind := plain(rows.field(field.name).type)) != field.type:
            yield another_type(field.name, kind, field.type)


def _check_key(lake: Delta, rows: pa.Schema, key: tuple[str, ...]) -> None:
    for name in key:
        kind = rows.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind):
            raise keys.unfit(lake, name, kind)


def columns_for(lake: Delta, fields: Sequence[pa.Field]) -> Schema:
    """Return the columns of a table for columns of rows. Each may be null. Raises MergeRefused for another type."""
    schema = pa.schema([pa.field(field.name, plain(field.type)) for field in fields])
    try:
        columns = Schema.from_arrow(schema)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise MergeRefused(f"{lake}: the table can get no such columns: {reason}: cast them") from error
    for field, exact in zip(pa.schema(columns.to_arrow()), schema, strict=True):
        if field.type != exact.type:
            raise MergeRefused(
                f"{lake}: the table can get no column {field.name!r} of type {exact.type}: cast it to {field.type}, or "
                "to another type that Delta has"
            )
        # Refuse the type: it would become a feature of the table, and from then on the table would be refused.
        if any(_needs_a_feature(part) for part in _parts(exact.type)):
            raise MergeRefused(
                f"{lake}: the table can get no column {field.name!r} of type {exact.type}: cast it, for example to "
                "timestamp[us] or to string"
            )
    return columns


def _needs_a_feature(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ns"))


def _parts(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield the type and the types nested in it."""
    yield kind
    for index in range(kind.num_fields):
        yield from _parts(kind.field(index).type)


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type that Delta has for the same values; the type itself if it has none.

    Arrow has several encodings of texts, of bytes and of lists. Times are in microseconds, and instants in UTC.
    """
    if pa.types.is_nested(kind):
        return _nested(kind)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", kind.tz and "UTC")
    return kind


def _nested(kind: pa.DataType) -> pa.DataType:
    fields = [field.with_type(plain(field.type)) for field in map(kind.field, range(kind.num_fields))]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(fields[0])
    if pa.types.is_map(kind):
        return pa.map_(*(plain(part.type) for part in (kind.key_field, kind.item_field)))
    return pa.struct(fields) if pa.types.is_struct(kind) else kind
