"""Frames with columns for JSON in changes: the payloads of events and the parts of messages."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType, FloatType, StringType, StructField, StructType

from airflow_pgchange.errors import InvalidArgument

EVENT_COLUMNS = ("event_id", "topic")
CORRUPT = "pgchange_corrupt"
TEXTS = "map<string,string>"


def columns_of_payloads(changes: DataFrame, schema: str | StructType) -> DataFrame:
    """Return the events with the fields of ``schema`` as columns, see ``Job.payloads``. Raises InvalidArgument."""
    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(fields, StructType):
        raise InvalidArgument(f"{schema!r} names no fields: write it as 'carrier string, delay int'")
    taken = sorted({*EVENT_COLUMNS, CORRUPT} & {name.lower() for name in fields.names})
    if taken:
        raise InvalidArgument(
            f"the frame already has a column {taken[0]}: take that field with from_json of the payload in changes()"
        )
    checked = StructType([*fields.fields, StructField(CORRUPT, StringType())])
    parsed = f.from_json("payload", checked, {"columnNameOfCorruptRecord": CORRUPT})
    problem = f.concat(
        f.lit("the payload of event "), "id", f.lit(f" does not fit {fields.simpleString()}: "), "payload"
    )
    fits = parsed[CORRUPT].isNull() & ~_too_large(parsed, fields)
    fitting = f.when(fits, parsed).otherwise(f.raise_error(problem))
    frame = changes.select(f.col("id").alias("event_id"), "topic", fitting.alias("payload"))
    return frame.select(*EVENT_COLUMNS, *(f.col("payload")[name].alias(name) for name in fields.names))


def columns_of_messages(changes: DataFrame) -> DataFrame:
    """Return the messages with their data, properties and headers as maps."""
    maps = [f.from_json(name, TEXTS).alias(name) for name in ("data", "properties", "headers")]
    return changes.select("id", *maps, "added")


def _too_large(parsed: Column, fields: StructType) -> Column:
    """Whether a number of the payload has become infinity. A text that says infinity, as PostgreSQL writes it, is
    allowed."""
    names = [field.name for field in fields if isinstance(field.dataType, FloatType | DoubleType)]
    written = f.from_json("payload", StructType([StructField(name, StringType()) for name in names]))
    is_too_large = f.lit(False)
    for name in names:
        number = (f.abs(parsed[name]) == float("inf")) & written[name].rlike("[0-9]")
        is_too_large = is_too_large | f.coalesce(number, f.lit(False))
    return is_too_large
