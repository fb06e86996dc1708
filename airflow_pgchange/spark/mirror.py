"""Prepare a frame for a merge in mode ``mirror``: give it the copy's columns and key, and add the ids that have no row.

The column ``TOUCHED`` marks the ids without a row for the merge.
"""

from __future__ import annotations

from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds.reading import KEY_PART
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.results.staging import TOUCHED
from airflow_pgchange.results.target import Target
from airflow_pgchange.spark.read_options import CHANGE
from airflow_pgchange.spark.types import staging_types

WHOLE = {t.ByteType, t.ShortType, t.IntegerType, t.LongType}
SHARD = "shard"
"""The column of a shared copy that says from which table a row is."""


def as_copied(
    frame: DataFrame, attached: Attached, copy: Target, *, evolve: bool
) -> tuple[DataFrame, tuple[str, ...]]:
    """Return the rows of an attached table with the columns of its copy, and the key of the copy.

    Raises MergeRefused if the copy lacks a column, unless ``evolve`` is true. Raises InvalidArgument if a shared copy
    lacks the column or the key of the shards. Also if the table itself has a column of that name.
    """
    types = staging_types(frame.drop(TOUCHED).schema)
    if not evolve and (lacking := [name for name in types if name not in copy.columns]):
        added = sql.SQL(", ").join(
            sql.SQL("add column {} {}").format(sql.Identifier(name), sql.SQL(types[name])) for name in lacking
        )
        alter = sql.SQL("alter table {} {}").format(copy.identifier, added).as_string(None)
        raise MergeRefused(
            f"{copy.name} lacks columns of {attached.table}: run `{alter}`, and backfill the table to fill them in "
            f"old rows. Or choose the columns to copy with columns=, or let the copy follow its source with evolve=True"
        )
    if not attached.shared and not copy.is_of_shards(SHARD, attached.key):
        return frame, attached.key
    copy.check_shards(SHARD, attached.key)
    if SHARD in map(str.lower, frame.columns):
        raise InvalidArgument(
            f'{attached.table} has a column "{SHARD}" of its own, which {copy.name} needs for the shards. Leave it '
            f"out with columns=, or merge rows() into a copy of your own "
            "design"
        )
    return frame.withColumn(SHARD, f.lit(attached.shard)), (SHARD, *attached.key)


def marked(changed: DataFrame, key: tuple[str, ...]) -> DataFrame:
    """Return the row of each change. If the row is gone, return its id alone, marked, unless the key's type cannot hold
    it."""
    ids = _columns_of_ids(changed, CHANGE, len(key))
    names = [name for name in changed.columns if name not in {CHANGE, *ids}]
    # Rename the columns, because Spark would read a dot in a column's name as a path.
    plain = changed.toDF(*(f"c{names.index(name)}" if name in names else name for name in changed.columns))
    held = {f"c{names.index(name)}": id_ for name, id_ in zip(key, ids, strict=True)}
    columns = [
        f.coalesce(f.col(name), f.col(held[name]).try_cast(field.dataType)).alias(name)
        if name in held
        else f.col(name)
        for name, field in zip(plain.columns, plain.schema.fields, strict=True)
        if name not in {CHANGE, *ids}
    ]
    rows = plain.select(*columns, f.col(next(iter(held))).isNull().alias(TOUCHED))
    return _not_null(rows, list(held)).toDF(*names, TOUCHED)


def with_touched(
    frame: DataFrame, changes: DataFrame, into: str, keys: tuple[str, ...], of_id: int
) -> DataFrame:
    """Return the frame with a marked row for the id of each change. An id with only a marked row is gone.

    An id that the key's type cannot hold is left out. The last ``of_id`` columns of the key are those of an id.
    ``changes`` has them, too.
    """
    ids = _columns_of_ids(changes, "id", of_id)
    _check_types(frame, changes, into, dict(zip(keys[-of_id:], ids, strict=True)))
    named = {**{name: name for name in keys[:-of_id]}, **dict(zip(keys[-of_id:], ids, strict=True))}
    unknown = sorted(set(named.values()) - set(changes.columns))
    if unknown:
        raise MergeRefused(
            f'{into}: "{unknown[0]}" of the key is no column of this feed\'s changes. They have '
            f"{', '.join(name for name in changes.columns if name not in {*ids} - {'id'})}. Use columns of the "
            f"changes as the key of a mirror, with the id last"
        )
    columns = [
        (f.col(named[field.name]) if field.name in named else f.lit(None))
        .try_cast(field.dataType)
        .alias(field.name)
        for field in frame.schema.fields
    ]
    held = changes
    for name, id_ in zip(keys[-of_id:], ids, strict=True):
        # Leave out an id that changes in the key's type: a number with more decimal places would be rounded to another
        # key.
        back = f.col(id_).try_cast(frame.schema[name].dataType).try_cast(changes.schema[id_].dataType)
        held = held.where(back == f.col(id_))
    touched = held.select(*columns, f.lit(True).alias(TOUCHED))
    return frame.withColumn(TOUCHED, f.lit(None).cast("boolean")).unionByName(touched)


def _columns_of_ids(changes: DataFrame, id_: str, count: int) -> list[str]:
    """Return the columns of an id in a frame of changes. For an id that is a number, this is the id itself."""
    columns = [KEY_PART.format(number) for number in range(1, count + 1)]
    return columns if columns[0] in changes.columns else [id_]


def _check_types(frame: DataFrame, changes: DataFrame, into: str, ids: dict[str, str]) -> None:
    """Raise MergeRefused if a key column of the frame has another type than the ids, because no row would then match."""
    for name, id_ in ids.items():
        comes, is_read = frame.schema[name].dataType, changes.schema[id_].dataType
        if type(comes) is not type(is_read) and not {type(comes), type(is_read)} <= WHOLE:
            raise MergeRefused(
                f'{into}: "{name}" of the key comes as {comes.simpleString()}, but the ids of the changes are '
                f"{is_read.simpleString()}: take the key from rows(), without a "
                "cast"
            )


def _not_null(rows: DataFrame, names: list[str]) -> DataFrame:
    for name in names:
        rows = rows.where(f.col(name).isNotNull())
    return rows
