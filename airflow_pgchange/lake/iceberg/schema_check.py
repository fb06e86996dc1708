"""Check that rows fit an Iceberg table, before a file is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, pyarrow_to_schema
from pyiceberg.schema import Schema, _SchemaCompatibilityVisitor, pre_order_visit
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import TableVersion
from pyiceberg.types import DoubleType, FloatType, NestedField, PrimitiveType

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.lake import keys
from airflow_pgchange.lake.schema_mismatch import another_type, missing, no_columns, refusal
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge_modes import Mode


def check(
    lake: LakeTable, metadata: TableMetadata, rows: pa.Schema, key: tuple[str, ...], mode: Mode
) -> None:
    """Raise MergeRefused if rows of this schema cannot be written in this mode exactly as they are."""
    keys.check_mode(lake, rows, key, mode)
    written_as = metadata.properties.get(TableProperties.WRITE_FILE_FORMAT, "parquet")
    if written_as.lower() != "parquet":
        raise MergeRefused(
            f"{lake}: the table's files are {written_as}, but only Parquet can be written: set the property "
            f"{TableProperties.WRITE_FILE_FORMAT} to parquet"
        )
    try:
        mismatches = list(_mismatches(metadata.schema(), rows, metadata.format_version))
    except (ValueError, TypeError, NotImplementedError, UnsupportedPyArrowTypeException) as error:
        raise refusal(lake, [str(error).rstrip(".")]) from error
    if mismatches:
        raise refusal(lake, mismatches)
    if inexact := next((field for field in _nested(rows) if _is_inexact(field)), None):
        raise MergeRefused(
            f"{lake}: PyIceberg cannot write each value of {inexact.name!r} of type {inexact.type} as it is: cast it, or "
            "write it as JSON"
        )
    if mode.behaviour.needs_key:
        _check_key(lake, metadata, key)


class _Comparison(_SchemaCompatibilityVisitor):
    """PyIceberg's comparison of two schemas. Columns that do not fit are collected, and not drawn as a table."""

    def __init__(self, rows: Schema) -> None:
        super().__init__(rows)
        self.mismatches: list[NestedField] = []

    def _is_field_compatible(self, lhs: NestedField) -> bool:
        fits = super()._is_field_compatible(lhs)
        if not fits:
            self.mismatches.append(lhs)
        return fits

    def schema(self, schema: Schema, struct_result: Callable[[], bool]) -> bool:
        return struct_result()


def _mismatches(table: Schema, rows: pa.Schema, version: TableVersion) -> Iterator[str]:
    """Yield, for each column that does not fit, the reason."""
    names = {field.name for field in table.fields}
    if more := [name for name in rows.names if name not in names]:
        yield no_columns(more, names)
        return
    schema = pyarrow_to_schema(rows, name_mapping=table.name_mapping, format_version=version)
    comparison = _Comparison(schema)
    pre_order_visit(table, comparison)
    ids = schema.field_ids
    for field in comparison.mismatches:
        name = str(table.find_column_name(field.field_id))
        if field.field_id not in ids:
            yield missing(name)
            continue
        kind = schema.find_field(field.field_id).field_type
        if kind == field.field_type:
            yield f"column {name} can be NULL in the rows, and the table requires a value"
        else:
            yield another_type(name, kind, field.field_type)


def _nested(fields: Iterable[pa.Field]) -> Iterator[pa.Field]:
    """Yield the fields and the fields nested in them."""
    for field in fields:
        yield field
        yield from _nested(field.type.field(index) for index in range(field.type.num_fields))


def _is_inexact(field: pa.Field) -> bool:
    """Whether PyIceberg silently changes some values of this type.

    It writes an unsigned integer as a signed integer of the same size. It writes a NULL list or map of structs as an
    empty list or map.
    """
    kind = field.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return bool(field.nullable and pa.types.is_struct(kind.value_type))
    if pa.types.is_map(kind):
        return bool(field.nullable and pa.types.is_struct(kind.item_type))
    return bool(pa.types.is_uint32(kind) or pa.types.is_uint64(kind))


def _check_key(lake: LakeTable, metadata: TableMetadata, key: tuple[str, ...]) -> None:
    for name in key:
        kind = metadata.schema().find_type(name)
        if not isinstance(kind, PrimitiveType) or isinstance(kind, FloatType | DoubleType):
            raise keys.unfit(lake, name, kind)
