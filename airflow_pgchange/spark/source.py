"""The data source ``pgchange``. It reads a batch's changes, or the current rows that they name, in partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import reading
from airflow_pgchange.feeds.batch import Batch, Partition
from airflow_pgchange.feeds.feed import Feed, partitions
from airflow_pgchange.feeds.key_columns import KeyColumn, key_columns, typed_columns
from airflow_pgchange.spark import adbc
from airflow_pgchange.spark.read_options import CHANGE, ReadOptions, explained, not_unique
from airflow_pgchange.spark.routing import RoutedReading
from airflow_pgchange.spark.types import Column, arrow_schema, describe, spark_schema
from airflow_pgchange.spark.unsupported_values import Rows
from airflow_pgchange.topology.bucket_owners import Cluster

NAME = "pgchange"
ROWS_A_PARTITION = 2_500_000
"""The largest number of changes in a partition by default. Partitions are streamed, so they can be large. Fewer are
better, because each joins with the table anew."""


@dataclass(frozen=True)
class Reading:
    """How to read changes or rows of a batch. It is sent to the executors, and its connection string is a secret."""

    feed: Feed
    batch: Batch
    source: str
    read_options: ReadOptions
    columns: tuple[Column, ...]
    key: tuple[KeyColumn, ...] = ()

    @classmethod
    def prepare(cls, feed: Feed, batch: Batch, source: str, read_options: ReadOptions) -> Reading:
        """Ask the source for the columns. Raises UnsupportedType, InvalidArgument for a column that does not exist, and
        PermissionDenied if row security hides rows."""
        with reading.connected(source, batch.lsn) as connection:
            with explained(read_options):
                key = _key(connection, batch, read_options)
                partition = _query(partitions(feed, batch, 1)[0], read_options, key)
                columns = tuple(describe(connection, partition.query))
            if read_options.table is not None:
                reading.check_whole(connection, read_options.table)
        return cls(feed, batch, source, read_options, columns, key)

    def __repr__(self) -> str:
        return f"Reading({self.feed.name}, {self.batch.id}, {self.read_options})"

    def schema(self) -> t.StructType:
        """Return the schema of the rows, in Spark's types."""
        if self.read_options.which == "gone":
            [id_] = [column for column in self.columns if column.name == CHANGE]
            return t.StructType([t.StructField("id", id_.spark)])
        return spark_schema(self.columns)

    def partitions(self, n: int) -> list[Partition]:
        """Return at most ``n`` partitions, in the order of the changes."""
        parts = partitions(self.feed, self.batch, n, self.read_options.shard)
        return [_query(partition, self.read_options, self.key) for partition in parts]

    def read(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, in the Arrow form of ``schema``."""
        read_schema = arrow_schema(spark_schema(self.columns))
        rows = Rows(
            self.read_options.table or f"the changes of {self.feed.name}", self.read_options.key or ("id",)
        )
        count = 0
        for batch in adbc.read(self.source, self.batch.lsn, partition, self.columns, read_schema, rows=rows):
            count += batch.num_rows
            if (
                self.read_options.table is not None
                and self.read_options.key is not None
                and count > partition.count
            ):
                raise InvalidArgument(not_unique(self.read_options.table, self.read_options.key))
            yield self._chosen(batch)

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.read_options.key is None or self.read_options.which == "every":
            return batch
        key = batch.column(self.read_options.key[0])
        if self.read_options.which == "gone":
            ids = batch.filter(pc.is_null(key)).column(CHANGE)
            return pa.RecordBatch.from_arrays([ids], names=["id"])
        return batch.filter(pc.is_valid(key)) if key.null_count else batch


def _key(
    connection: psycopg.Connection[Any], batch: Batch, read_options: ReadOptions
) -> tuple[KeyColumn, ...]:
    """Return the key columns of the table, or, if they are wanted, the columns of the changes' ids."""
    if read_options.table is not None and read_options.key is not None:
        return key_columns(connection, read_options.table, read_options.key, batch.key)
    return typed_columns(connection, batch.key) if read_options.typed else ()


def _query(partition: Partition, read_options: ReadOptions, key: Sequence[KeyColumn]) -> Partition:
    if read_options.table is None or read_options.key is None:
        return reading.with_key_parts(partition, key) if key else partition
    return reading.current_rows(
        partition,
        read_options.table,
        key,
        [] if read_options.which == "gone" else read_options.columns,
        tube=read_options.tube,
        named=read_options.which != "there",
        typed=read_options.which == "every",
    )


class Readable(Protocol):
    """Data that can be read in partitions, which are sent to the executors."""

    def schema(self) -> t.StructType: ...

    def partitions(self, n: int) -> list[Any]: ...

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]: ...


def prepare(
    feed: Feed, batch: Batch, source: str, read_options: ReadOptions, cluster: Cluster | None
) -> Readable:
    """Return how to read the wanted data: from the source, or from the instances of a cluster."""
    if read_options.rule is None:
        return Reading.prepare(feed, batch, source, read_options)
    return RoutedReading.prepare(feed, batch, source, read_options, cluster)


@dataclass
class Part(InputPartition):
    """A partition on its way to an executor."""

    partition: Any


class PgChangeReader(DataSourceReader):
    def __init__(self, reading: Readable, partitions: int) -> None:
        self._reading = reading
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        return [Part(partition) for partition in self._reading.partitions(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # An empty list of partitions arrives as one partition of None.
        if isinstance(partition, Part):
            yield from self._reading.read(partition.partition)


def data_source(
    feed: Feed, batch: Batch, source: str, parallelism: int, cluster: Cluster | None = None
) -> type[DataSource]:
    """Return the class of the data source for one batch, for registration in a session.

    The connection strings are in the pickled class, because options appear in plans, in the event log and in the UI.
    The options are the fields of ``ReadOptions`` and of its ``Rule``, and the number of ``partitions``. ``columns`` and
    the key of several columns, as ``keys``, are JSON lists.
    """
    usual = max(parallelism, -(-batch.count // ROWS_A_PARTITION))

    class PgChange(DataSource):
        @classmethod
        def name(cls) -> str:
            return NAME

        def _prepared(self) -> Readable:
            return prepare(feed, batch, source, ReadOptions.from_options(self.options), cluster)

        def schema(self) -> t.StructType:
            return self._prepared().schema()

        def reader(self, schema: t.StructType) -> DataSourceReader:
            return PgChangeReader(self._prepared(), int(self.options.get("partitions", usual)))

    return PgChange
