"""What a frame needs to be merged as a mirror: the copy's columns and key, and the ids that are without a row.

Each row is marked for the merge, in the column ``TOUCHED``.
"""

from __future__ import annotations

from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.results.attached import Attached
from airflow_pgchange.results.staging import TOUCHED
from airflow_pgchange.results.target import Target
from airflow_pgchange.spark.read_options import CHANGE
from airflow_pgchange.spark.types import staging_types

SHARD = "shard"
"""The column of a copy of several tables' rows that says which table a row is of."""


def as_copied(
    frame: DataFrame, attached: Attached, copy: Target, *, evolve: bool
) -> tuple[DataFrame, tuple[str, ...]]:
    """The rows of an attached table as its copy has them, and the key that they have there.

    Raises MergeRefused where the copy lacks a column of them, unless it is to ``evolve``; InvalidArgument where it is
    shared and lacks the column or the key of the shards, or the table has a column of that name itself.
    """
    types = staging_types(frame.drop(TOUCHED).schema)
    if not evolve and (lacking := [name for name in types if name not in copy.columns]):
        added = sql.SQL(", ").join(
            sql.SQL("add column {} {}").format(sql.Identifier(name), sql.SQL(types[name])) for name in lacking
        )
        alter = sql.SQL("alter table {} {}").format(copy.identifier, added).as_string(None)
        raise MergeRefused(
            f"{copy.name} lacks columns of {attached.table}: run `{alter}`, and backfill the table if they "
            "are to hold what was there before; or choose what to copy with columns=; or let the copy follow its source "
            "with evolve=True"
        )
    if not attached.shared and not copy.is_of_shards(SHARD, attached.id_column):
        return frame, (attached.id_column,)
    copy.check_shards(SHARD, attached.id_column)
    if SHARD in map(str.lower, frame.columns):
        raise InvalidArgument(
            f'{attached.table} has a column "{SHARD}" of its own, which {copy.name} needs for the tables\' shards: '
            "leave it out with columns=, or merge rows() into a copy of your own design"
        )
    return frame.withColumn(SHARD, f.lit(attached.shard)), (SHARD, attached.id_column)


def marked(changed: DataFrame, key: str) -> DataFrame:
    """Of every change its row or, marked, its id alone where the row is gone and the key can hold it."""
    names = [name for name in changed.columns if name != CHANGE]
    # Spark reads a column's name as a path of names: of ours it can make one thing alone.
    plain = changed.toDF(*("id" if name == CHANGE else f"c{names.index(name)}" for name in changed.columns))
    held = f"c{names.index(key)}"
    named = f.coalesce(f.col(held), f.col("id").try_cast(changed.schema[key].dataType))
    columns = [named.alias(name) if name == held else f.col(name) for name in plain.columns if name != "id"]
    rows = plain.select(*columns, f.col(held).isNull().alias(TOUCHED)).where(f.col(held).isNotNull())
    return rows.toDF(*names, TOUCHED)


def with_touched(frame: DataFrame, changes: DataFrame, into: str, keys: tuple[str, ...]) -> DataFrame:
    """The frame and, marked, the id of each of the changes that the key can hold: what is then without a row is gone."""
    named = {**{name: name for name in keys[:-1]}, keys[-1]: "id"}
    unknown = sorted(set(named.values()) - set(changes.columns))
    if unknown:
        raise MergeRefused(
            f'{into}: "{unknown[0]}" of the key is no column of this feed\'s changes, which have '
            f"{', '.join(changes.columns)}: the key of a mirror is theirs, the id last"
        )
    columns = [
        (f.col(named[field.name]) if field.name in named else f.lit(None))
        .try_cast(field.dataType)
        .alias(field.name)
        for field in frame.schema.fields
    ]
    held = changes.where(f.col("id").try_cast(frame.schema[keys[-1]].dataType).isNotNull())
    touched = held.select(*columns, f.lit(True).alias(TOUCHED))
    return frame.withColumn(TOUCHED, f.lit(None).cast("boolean")).unionByName(touched)
