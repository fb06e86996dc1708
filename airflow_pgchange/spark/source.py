"""The data source ``pgchange``: a batch's changes, or the current rows that they name, read in partitions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from airflow_pgchange.feeds import reading
from airflow_pgchange.feeds.batch import Batch, Partition
from airflow_pgchange.feeds.connect import connect
from airflow_pgchange.feeds.errors import InvalidArgument, PermissionDenied
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.tables import table_identifier
from airflow_pgchange.spark import arrow
from airflow_pgchange.spark.types import Column, describe, spark_schema

NAME = "pgchange"
CHANGE = "pgchange_id"
ROWS_A_PARTITION = 2_500_000
"""Partitions are streams, so few and large ones: each joins with the table anew."""


@dataclass(frozen=True)
class Wanted:
    """What to read of a batch: its changes, or with ``table`` and ``key`` the rows of a table that they name.

    ``gone`` asks instead for the changes whose row is not there any more: their ids, in the one column ``id``. ``shard``
    asks for what the batch has of one shard. ``tube``: rows that its predicate does not hold for are not there.
    """

    table: str | None = None
    key: str | None = None
    columns: tuple[str, ...] | None = None
    gone: bool = False
    shard: int | None = None
    tube: str | None = None

    def __post_init__(self) -> None:
        if (self.table is None) != (self.key is None):
            raise InvalidArgument(
                "table and key go together: the table, and the column that holds the changes' ids"
            )
        if self.table is None and (self.columns is not None or self.gone):
            raise InvalidArgument(
                "columns and gone are about the rows of a table: name it with table and key"
            )

    def options(self) -> dict[str, str]:
        """As options of the data source; they show in plans, so there is nothing secret in them."""
        given = {
            "table": self.table,
            "key": self.key,
            "columns": None if self.columns is None else json.dumps(self.columns),
            "gone": "true" if self.gone else None,
            "shard": None if self.shard is None else str(self.shard),
            "tube": self.tube,
        }
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Wanted:
        columns, shard = options.get("columns"), options.get("shard")
        return cls(
            table=options.get("table"),
            key=options.get("key"),
            columns=None if columns is None else tuple(json.loads(columns)),
            gone=options.get("gone", "false").lower() == "true",
            shard=None if shard is None else int(shard),
            tube=options.get("tube"),
        )


@dataclass(frozen=True)
class Reading:
    """How to read something of a batch: travels to the executors, with a connection string that is a secret."""

    feed: Feed
    batch: Batch
    source: str
    wanted: Wanted
    columns: tuple[Column, ...]

    @classmethod
    def prepare(cls, feed: Feed, batch: Batch, source: str, wanted: Wanted) -> Reading:
        """Ask the source what the columns are. Raises UnsupportedType, InvalidArgument for a column that is not there,
        and PermissionDenied where row security hides rows."""
        partition = _query(feed.partitions(batch, 1)[0], wanted)
        with connect(source) as connection:
            with _explained(wanted):
                columns = tuple(describe(connection, partition.query))
            if wanted.table is not None:
                reading.check_whole(connection, wanted.table)
        return cls(feed, batch, source, wanted, columns)

    def __repr__(self) -> str:
        return f"Reading({self.feed.name}, {self.batch.id}, {self.wanted})"

    def schema(self) -> t.StructType:
        """What comes out, in Spark's types."""
        if self.wanted.gone:
            return t.StructType([t.StructField("id", t.LongType())])
        return spark_schema([column for column in self.columns if column.name != CHANGE])

    def partitions(self, n: int) -> list[Partition]:
        """At most ``n`` partitions, in the order of the changes."""
        parts = self.feed.partitions(self.batch, n, self.wanted.shard)
        return [_query(partition, self.wanted) for partition in parts]

    def read(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, in the Arrow form of ``schema``."""
        read_schema = to_arrow_schema(spark_schema(self.columns), timezone="UTC")
        found = 0
        for batch in arrow.read(self.source, self.batch.lsn, partition, self.columns, read_schema):
            found += batch.num_rows
            if self.wanted.table is not None and found > partition.count:
                raise InvalidArgument(
                    f'"{self.wanted.key}" is not unique in {self.wanted.table}, so a change would name several rows: '
                    "give the column that holds the changes' ids, or join with changes() in Spark"
                )
            yield self._chosen(batch)

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.wanted.key is None:
            return batch
        missing = pc.is_null(batch.column(self.wanted.key))
        if self.wanted.gone:
            ids = batch.filter(missing).column(CHANGE)
            return pa.RecordBatch.from_arrays([ids], names=["id"])
        there = batch.filter(pc.invert(missing))
        return there.select([name for name in there.schema.names if name != CHANGE])


@contextmanager
def _explained(wanted: Wanted) -> Iterator[None]:
    """What PostgreSQL says of a table that somebody named, with what to do."""
    try:
        yield
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction) as error:
        raise InvalidArgument(
            f"{error.diag.message_primary}: correct the table, its key or the columns"
        ) from error
    except PermissionDenied as error:
        if wanted.table is None:
            raise
        raise PermissionDenied(
            f"the role of the source's connection may not read {wanted.table}: let its owner run "
            f"`grant select on {table_identifier(wanted.table).as_string(None)} to <role>`, and "
            "`grant usage` on its schema"
        ) from error


def _query(partition: Partition, wanted: Wanted) -> Partition:
    if wanted.table is None or wanted.key is None:
        return partition
    columns = [wanted.key] if wanted.gone else wanted.columns
    return reading.current_rows(partition, wanted.table, wanted.key, columns, tube=wanted.tube)


@dataclass
class Part(InputPartition):
    """A partition on its way to an executor."""

    partition: Partition


class PgChangeReader(DataSourceReader):
    def __init__(self, reading: Reading, partitions: int) -> None:
        self._reading = reading
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        return [Part(partition) for partition in self._reading.partitions(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # An empty list of partitions arrives as one partition of None.
        if isinstance(partition, Part):
            yield from self._reading.read(partition.partition)


def data_source(feed: Feed, batch: Batch, source: str, parallelism: int) -> type[DataSource]:
    """The data source of one batch, to be registered in a session.

    The connection string travels in the pickled class: options end in plans, in the event log and in the UI. Options:
    ``table`` and ``key`` (none: the changes), ``columns`` (a JSON list), ``gone``, ``shard``, ``tube``, ``partitions``.
    """
    usual = max(parallelism, -(-batch.count // ROWS_A_PARTITION))

    class PgChange(DataSource):
        @classmethod
        def name(cls) -> str:
            return NAME

        def _prepared(self) -> Reading:
            return Reading.prepare(feed, batch, source, Wanted.from_options(self.options))

        def schema(self) -> t.StructType:
            return self._prepared().schema()

        def reader(self, schema: t.StructType) -> DataSourceReader:
            return PgChangeReader(self._prepared(), int(self.options.get("partitions", usual)))

    return PgChange
