"""Read rows of a table that is spread over a cluster: each range of buckets from the instance that owns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyspark.sql import types as t

from airflow_pgchange.errors import BatchIncomplete, InvalidArgument, ServerUnavailable
from airflow_pgchange.feeds import reading
from airflow_pgchange.feeds.batch import Batch, Partition
from airflow_pgchange.feeds.connections import complete, connect
from airflow_pgchange.feeds.feed import Feed, partitions
from airflow_pgchange.feeds.key_columns import KeyColumn, found_by, key_columns
from airflow_pgchange.feeds.keys import BIGINT
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.spark import adbc
from airflow_pgchange.spark.read_options import ReadOptions, Rule, explained, not_unique
from airflow_pgchange.spark.types import Column, arrow_schema, describe, spark_schema
from airflow_pgchange.spark.unsupported_values import Rows
from airflow_pgchange.topology import bucket_owners
from airflow_pgchange.topology.bucket_owners import Cluster, Share

T = TypeVar("T")

BUCKET, STRAY, PLACE = OURS = "pgchange_bucket", "pgchange_stray", "pgchange_place"
"""Columns that the caller does not get. The place is the number of the row's change in the query."""
IDS_A_QUESTION = 50_000
"""The number of ids in one query to an instance. Their rows are kept in memory until the owners of their buckets are
known to be unchanged."""
LONGEST_PAUSE = 2.0
"""The longest pause between two attempts, in seconds."""

ROWS = """
    select {selected}, q.pgchange_place,
           (t.pgchange_bucket <@ {all}::pg_catalog.int8multirange) is not true as pgchange_stray
    from (select r.*, ({bucket})::pg_catalog.int8 as pgchange_bucket from {table} r) t
    join rows from ({ids}) with ordinality q ({names}, pgchange_place) on {found}
    where t.pgchange_bucket <@ {buckets}::pg_catalog.int8multirange
       or (t.pgchange_bucket <@ {all}::pg_catalog.int8multirange) is not true
"""
"""A stray is a row in a bucket that the tier does not have. No instance would be asked for such a bucket."""


@dataclass(frozen=True)
class RoutedPart:
    """A query for the ids of some changes, and the buckets in which to look for their rows."""

    changes: Partition
    buckets: str


@dataclass(frozen=True)
class RoutedReading:
    """How to read rows out of a cluster. It is sent to the executors, and its connection strings are secrets."""

    feed: Feed
    batch: Batch
    source: str = field(repr=False)
    cluster: Cluster
    read_options: ReadOptions
    table: str
    names: tuple[str, ...]
    rule: Rule
    buckets: str
    ids: tuple[Column, ...]
    key: tuple[KeyColumn, ...] = ()
    columns: tuple[Column, ...] = ()

    @classmethod
    def prepare(
        cls, feed: Feed, batch: Batch, source: str, read_options: ReadOptions, cluster: Cluster | None
    ) -> RoutedReading:
        """Ask the catalogue for the buckets, and a master for the columns. Raises InvalidArgument if they are invalid,
        ServerUnavailable if the catalogue does not answer, and BatchIncomplete if no master answers."""
        if read_options.table is None or read_options.key is None or read_options.rule is None:
            raise InvalidArgument("bucket needs a table: name it with table and key")
        if cluster is None:
            raise InvalidArgument(
                "no cluster was handed to this application: give SparkBatchOperator catalogue_conn_id"
            )
        with connect(cluster.catalogue, primary=True) as connection:
            buckets = bucket_owners.all_buckets(connection, read_options.rule.tier)
        with reading.connected(source, batch.lsn) as connection:
            ids = tuple(describe(connection, _ids(partitions(feed, batch, 1)[0]).query))
        undescribed = cls(
            feed,
            batch,
            source,
            cluster,
            read_options,
            read_options.table,
            read_options.key,
            read_options.rule,
            buckets,
            ids,
        )
        return undescribed._described()

    def schema(self) -> t.StructType:
        """Return the schema of the rows, in Spark's types."""
        return spark_schema([column for column in self.columns if column.name not in OURS])

    def partitions(self, n: int) -> list[RoutedPart]:
        """Return about ``n`` partitions. Each has some of the changes and the buckets of one replicaset."""
        shares = self._shares(self.buckets)
        parts = partitions(self.feed, self.batch, max(1, n // len(shares)), self.read_options.shard)
        return [RoutedPart(_ids(part), share.buckets) for part in parts for share in shares]

    def read(self, part: RoutedPart) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, in the Arrow form of ``schema``."""
        schema = _arrow(self.ids)
        changes = Rows(f"the changes of {self.feed.name}", ("id",))
        ids = pa.Table.from_batches(
            adbc.read(self.source, self.batch.lsn, part.changes, self.ids, schema, rows=changes), schema
        ).column(0)
        for start in range(0, len(ids), IDS_A_QUESTION):
            yield from self._rows(ids.slice(start, IDS_A_QUESTION).to_pylist(), part.buckets)

    def _rows(self, ids: Sequence[object], buckets: str) -> list[pa.RecordBatch]:
        """Return the rows of these changes in these buckets.

        The rows of a bucket count only if it had the same owner during the whole read. An instance that has lost a
        bucket may already have deleted rows. Such buckets are read again.
        """
        batches, left = list[pa.RecordBatch](), buckets

        def attempt() -> None:
            nonlocal left
            with self._catalogue() as connection:
                began = bucket_owners.now(connection)
                shares = bucket_owners.shares(connection, self.rule.tier, left)
            rows = pa.concat_tables(self._share(share, ids) for share in shares)
            with self._catalogue() as connection:
                lost = bucket_owners.lost(connection, self.rule.tier, left, shares, began)
            batches.extend(_outside(rows, lost).drop_columns(list(OURS)).to_batches())
            if lost is not None:
                left = lost
                raise ServerUnavailable("buckets moved, or a master changed, while they were read")

        self._patiently(attempt, buckets)
        return batches

    def _share(self, share: Share, ids: Sequence[object]) -> pa.Table:
        server = self._server(share)
        with connect(server) as connection:
            reading.check_whole(connection, self.table)
        query, schema = self._query(ids, share.buckets), _arrow(self.columns)
        named = Rows(f"{self.table} at {share.master}", self.names)
        rows = pa.Table.from_batches(adbc.read_whole(server, query, self.columns, schema, rows=named), schema)
        self._check(rows, share)
        return rows

    def _check(self, rows: pa.Table, share: Share) -> None:
        """Raise InvalidArgument if a change names several rows, or a row in a bucket that the tier does not have."""
        if pc.count_distinct(rows.column(PLACE)).as_py() < rows.num_rows:
            raise InvalidArgument(not_unique(self.table, self.names))
        strays = rows.filter(rows.column(STRAY))
        if strays.num_rows:
            raise InvalidArgument(
                f"a row of {self.table} at {share.master} is in bucket {strays.column(BUCKET)[0]}, which nobody owns: "
                f"tier {self.rule.tier!r} has {self.buckets}; correct the rule, or assign the bucket"
            )

    def _described(self) -> RoutedReading:
        """Return this reading with the columns of the table on an instance."""

        def attempt() -> RoutedReading:
            share = self._shares(self.buckets)[0]
            with connect(self._server(share)) as connection, explained(self.read_options):
                keyed = replace(self, key=key_columns(connection, self.table, self.names, self.batch.key))
                columns = describe(connection, keyed._query([], share.buckets))
                return replace(keyed, columns=tuple(columns))

        return self._patiently(attempt, self.buckets)

    def _query(self, ids: Sequence[object], buckets: str) -> str:
        """Return the query for the rows that some ids name in some buckets."""
        names = (
            None
            if self.read_options.columns is None
            else dict.fromkeys([*self.names, *self.read_options.columns])
        )
        arrays, columns = self._arrays(ids), [f"pgchange_id_{index}" for index, _ in enumerate(self.key)]
        some = [sql.Identifier("t", name) for name in [*(names or []), BUCKET]]
        query = sql.SQL(ROWS).format(
            selected=sql.SQL("t.*") if names is None else sql.SQL(", ").join(some),
            all=self.buckets,
            bucket=sql.SQL(self.rule.bucket),
            table=table_identifier(self.table),
            ids=sql.SQL(", ").join(arrays),
            names=sql.SQL(", ").join(map(sql.Identifier, columns)),
            found=found_by("t", self.key, [sql.Identifier("q", name) for name in columns]),
            buckets=buckets,
        )
        return query.as_string(None)

    def _arrays(self, ids: Sequence[Any]) -> list[sql.Composed]:
        """Return the ids as sets of values, a set for each column of the key."""
        if len(self.key) == 1:
            kind = dict(self.feed.columns)["id"] if self.batch.key == BIGINT else "text"
            return [sql.SQL("pg_catalog.unnest({}::{}[])").format(list(ids), sql.SQL(kind))]
        return [
            sql.SQL("pg_catalog.unnest({}::text[])").format([id_[index] for id_ in ids])
            for index, _ in enumerate(self.key)
        ]

    def _shares(self, buckets: str) -> list[Share]:
        """Return the current owners of buckets. Raises ServerUnavailable."""
        with self._catalogue() as connection:
            return bucket_owners.shares(connection, self.rule.tier, buckets)

    def _catalogue(self) -> psycopg.Connection[Any]:
        return connect(self.cluster.catalogue, primary=True)

    def _server(self, share: Share) -> str:
        """Return the connection string of the master that owns a share. Raises ServerUnavailable if the catalogue has
        none."""
        if share.unavailable_because is not None or share.address is None:
            raise ServerUnavailable(str(share.unavailable_because))
        return complete(bucket_owners.at(self.cluster.instances, share.address), primary=True)

    def _patiently(self, attempt: Callable[[], T], buckets: str) -> T:
        """Retry an attempt while servers fail, and return its result. Raises BatchIncomplete after the timeout."""
        until, pause = time.monotonic() + self.rule.timeout, 0.1
        while True:
            try:
                return attempt()
            except ServerUnavailable as error:
                if time.monotonic() + pause > until:
                    raise BatchIncomplete(
                        f"buckets {buckets:.200} of tier {self.rule.tier!r} could not be read within "
                        f"{self.rule.timeout:g} s; the last error: {error}"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _ids(partition: Partition) -> Partition:
    query = sql.SQL("select c.id from ({}) c").format(sql.SQL(partition.query))
    return Partition(query.as_string(None), partition.count)


def _outside(rows: pa.Table, buckets: str | None) -> pa.Table:
    """Return the rows outside of these buckets."""
    if buckets is None:
        return rows
    inside = bucket_owners.among(rows.column(BUCKET).unique().to_pylist(), buckets)
    return rows.filter(pc.invert(pc.is_in(rows.column(BUCKET), pa.array(inside, pa.int64()))))


def _arrow(columns: Sequence[Column]) -> pa.Schema:
    return arrow_schema(spark_schema(columns))
