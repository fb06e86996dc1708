"""One batch in a Spark session: its changes and rows as frames, and the merges of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.event_log import EventFeed
from airflow_pgchange.feeds.feed import Feed, shards
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.message_queue import QueueFeed
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.reading import connected
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.results.column_comparison import columns_of_frame, columns_of_table
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.schema_evolution import Source
from airflow_pgchange.results.staging import TOUCHED, Copied, Result
from airflow_pgchange.results.target import look_up
from airflow_pgchange.spark import session
from airflow_pgchange.spark.lake_sink import LakeSink, lake_sink
from airflow_pgchange.spark.mirror import as_copied, marked, with_touched
from airflow_pgchange.spark.payloads import columns_of_messages, columns_of_payloads
from airflow_pgchange.spark.read_options import PATIENCE, ReadOptions, Rule
from airflow_pgchange.spark.request import Work
from airflow_pgchange.spark.source import NAME, data_source, prepare
from airflow_pgchange.spark.table_sink import TableSink, table_sink
from airflow_pgchange.spark.types import arrow_schema, staging_types

SMALL = 50_000
"""Below this number of changes the driver reads a batch itself, and up to this number of rows it stages the results.

A data source on the executors takes seconds to start. Measured with ``python -m tests.benchmarks spark_start`` beside a
warm server. The driver's time as a part of the executors' time was, in the first and in the second batch of a session:

- 5,000 changes: 0.27 and 1.01
- 20,000 changes: 0.27 and 0.66
- 50,000 changes: 0.28 and 0.73
- 100,000 changes: 0.37 and 1.21
"""


class Job:
    """One batch in a Spark session. ``batch_job`` and ``batch_jobs`` make jobs."""

    def __init__(
        self,
        spark: SparkSession,
        work: Work,
        note: Callable[[str, str], None] = lambda step, how_far: None,
    ) -> None:
        self.spark = spark
        self.feed: Feed = work.feed
        self.batch: Batch = work.batch
        self.staged: list[Result] = []
        self.ended = False
        self._work = work
        self._note = note
        self._small = self._is_small()
        if not self._small:
            session.ship(spark)
            parallelism = session.parallelism(spark)
            spark.dataSource.register(
                data_source(work.feed, work.batch, work.source, parallelism, work.cluster)
            )

    def attached(self) -> list[Attached]:
        """Return the tables that are attached to the tube under the shards of this batch's changes.

        A table that was detached is left out, although the batch may still have ids of it. Its copy is no longer kept up
        to date, so the table needs a backfill when it is attached again. Raises InvalidArgument for a batch of another
        kind of feed.
        """
        feed = self.feed
        if not isinstance(feed, TubeFeed):
            raise InvalidArgument(f"{feed.name} is a {feed.kind} feed: tables are attached to tubes")
        of_batch = self.shards()
        return [attached for attached in self._attached_to(feed) if attached.shard in of_batch]

    def shards(self) -> list[int]:
        """Return the shards of the batch's changes, for feeds that have shards."""
        return shards(self.feed, self.batch)

    def changes(self, shard: int | None = None) -> DataFrame:
        """Return the changes of the batch: a row for each, in the feed's columns. ``id`` is the key of the changed row:
        a long for one column of integers, a string for another column, an array of strings for several columns. The
        strings are PostgreSQL's output of the values. Here and below, ``shard`` selects the changes of one shard."""
        return self._frame(ReadOptions(shard=shard))

    def payloads(self, schema: str | StructType) -> DataFrame:
        """Return the events with their payloads as columns: ``event_id``, ``topic`` and the fields of ``schema``.

        ``schema`` is a Spark schema or its DDL, such as ``"carrier string, delay int"``. A field that is missing in a
        payload is null. A payload that does not fit the schema fails the action that reads the frame, with the event's
        id. Inside nested fields Spark reads a number that is too large for a ``float`` or ``double`` as infinity. If
        payloads have no schema, take them as JSON from ``changes()``. Raises InvalidArgument for a batch of another kind
        of feed.
        """
        if not isinstance(self.feed, EventFeed):
            raise InvalidArgument(f"{self.feed.name} is a {self.feed.kind} feed: only events have payloads")
        return columns_of_payloads(self.changes(), schema)

    def messages(self) -> DataFrame:
        """Return the messages: ``id`` (the iid), ``data``, ``properties`` and ``headers`` as maps of text, ``added``.

        A null in a message is a null in its map. Raises InvalidArgument for a batch of another kind of feed.
        """
        if not isinstance(self.feed, QueueFeed):
            raise InvalidArgument(f"{self.feed.name} is a {self.feed.kind} feed: only queues have messages")
        return columns_of_messages(self.changes())

    def rows(
        self,
        table: str | Attached,
        key: KeyNames | None = None,
        columns: Sequence[str] | None = None,
        *,
        shard: int | None = None,
    ) -> DataFrame:
        """Return the current rows of ``table`` that the changes name: a row for each change, none if the row is gone.

        ``key`` is the column with the ids of the changes, such as ``"id"``. If an id has several columns, ``key`` lists
        them in the order of the ids, such as ``["tenant", "no"]``. The key is always among the columns. A row that was
        changed twice, or whose commit was approved twice, comes twice. The frame of a large batch is lazy: each action
        reads it again. So ``cache()`` a frame that is used twice. Raises UnsupportedType, with the column's name, if a
        column cannot be read exactly. ``columns`` can leave that column out. Raises PermissionDenied if row security
        hides rows.

        For an ``Attached``, the key and the shard are known. A row for which the tube's predicate is false counts as
        gone. A row for which the predicate raises an error does not. The predicate runs with the rights of the table's
        owner. The owner grants ``execute`` on it to the role of the source's connection.
        """
        return self._frame(ReadOptions.of(table, key, shard, columns=columns))

    def routed(
        self,
        table: str,
        key: KeyNames,
        bucket: str,
        columns: Sequence[str] | None = None,
        *,
        tier: str = "default",
        shard: int | None = None,
        timeout: Seconds = PATIENCE,
    ) -> DataFrame:
        """Return ``rows`` of a table that is spread over a cluster, each range of buckets read from its own master.

        The cluster's catalogue names the masters. If a read fails, or the range got another owner meanwhile, the rows
        read so far are discarded and the catalogue is asked again. So no row comes twice.

        ``bucket`` is the table's rule: an SQL expression over a row, such as ``"account_id % 3000"``. Its value must
        never change for a row. Raises InvalidArgument for buckets without an owner, and if the operator has no
        catalogue. Raises BatchIncomplete if a range could not be read for ``timeout``.
        """
        chosen = None if columns is None else tuple(columns)
        return self._frame(
            ReadOptions(
                table,
                names_of(key),
                chosen,
                shard=shard,
                rule=Rule(bucket, tier, seconds("timeout", timeout)),
            )
        )

    def gone(
        self, table: str | Attached, key: KeyNames | None = None, *, shard: int | None = None
    ) -> DataFrame:
        """Return the ids, in the column ``id``, of the changes whose row is no longer in ``table``.

        The ids have the type that they have in ``changes()``.
        """
        return self._frame(ReadOptions.of(table, key, shard, which="gone"))

    def mirror(
        self,
        table: str | Attached,
        into: str | LakeTable,
        columns: Sequence[str] | None = None,
        *,
        key: KeyNames | None = None,
        shard: int | None = None,
        evolve: bool = False,
    ) -> None:
        """Bring the copy of a table up to date: ``merge`` in mode ``mirror`` with the table's ``rows``.

        The rows are read and staged together with the ids that have no row any more. For an ``Attached``, ``{tube}``
        and ``{table}`` in ``into`` stand for the names of the tube and of the table. Columns that the copy generates
        are left out. A shared copy holds the rows of several tables, or did before the others were dropped. It has a
        column ``shard``, and its key is the shard and the key of the table.

        ``evolve``: the copy follows the table first, in a short transaction of its own. It gets the table's new columns
        that may be null and have no default, and its longer strings and wider numbers. Any other change is refused with
        the statement for it. The role of the results must own the copy.

        Raises MergeRefused if the copy lacks a column of the table. Raises InvalidArgument if a shared copy lacks that
        column or key. Also if another table has the same name and shard, because a copy could not tell their rows
        apart. Raises PermissionDenied if the owner of the tube's pods may not write the table that ``into`` names. Also
        if the owner of that table could run code with this role's rights.
        """
        if isinstance(table, Attached) and (key is not None or shard is not None):
            raise InvalidArgument(
                f"{table.table}: an attached table has its own key and shard: leave them out"
            )
        read_options = ReadOptions.of(table, key, shard, columns=columns, which="every")
        if not isinstance(into, str):
            assert read_options.key is not None
            frame = marked(self._frame(read_options), read_options.key)
            self._stage(
                into, read_options.key, Mode.MIRROR, frame.drop(TOUCHED), lambda: frame, evolve=evolve
            )
            return
        with connect(self._work.results, primary=True) as connection:
            copy = into if isinstance(table, str) else table.copy_in(connection, into)
            target = look_up(connection, copy)
        assert read_options.key is not None
        made = [name for name, column in target.columns.items() if column.generated]
        frame = marked(self._frame(read_options), read_options.key).drop(*made)
        keys = read_options.key
        copied = None
        if not isinstance(table, str):
            copied = Copied(*table.parts, tuple(name for name in frame.columns if name != TOUCHED))
            frame, keys = as_copied(frame, table, target, evolve=evolve)
        shown = frame.drop(TOUCHED)
        source = self._source(read_options.table or copy, shown) if evolve else None
        self._stage(copy, keys, Mode.MIRROR, shown, lambda: frame, copied=copied, source=source)

    def merge(
        self,
        frame: DataFrame,
        into: str | LakeTable,
        key: KeyNames,
        mode: Mode | str,
        *,
        shard: int | None = None,
        evolve: bool = False,
    ) -> None:
        """Stage ``frame`` now. The operator merges it into the table ``into`` in the consumer transaction.

        ``into`` is the name of a table of PostgreSQL, or a table of a lake: ``Iceberg``, ``RemoteIceberg`` or ``Delta``.
        ``mode`` is a ``Mode`` or its name:

        - ``add`` sums numbers for each key and adds them to the target's. It is right only for rows that never change,
          such as those of a commit queue.
        - ``replace`` inserts or overwrites a row for each key.
        - ``mirror`` inserts or overwrites rows, and deletes the ids of the batch (with ``shard``, of that shard) that
          the frame lacks. ``key`` ends with the columns of the changes' ids. Other columns of the changes may come
          before them, as in ``["shard", "id"]``.
        - ``append`` inserts rows.

        Only the frame's columns are written. Values are rounded to the target's scale, as in any insert. Keys and added
        numbers are not, because a sum of rounded parts would depend on where batches end. Only the last digits of a
        ``double precision`` may differ. Raises InvalidArgument for an unknown mode. Raises MergeRefused, before any
        work is done, if the frame does not fit or the block has ended.

        ``evolve``: the target first gets the frame's new columns and the digits of its decimals, in a short transaction
        of its own. The role of the results must own it. A table of a lake gets new columns only, each of which may be
        null.
        """
        keys, chosen = names_of(key), Mode.of(mode)

        def marked_rows() -> DataFrame:
            if not chosen.behaviour.deletes_touched:
                return frame
            touched = self._frame(ReadOptions(shard=shard, typed=True))
            return with_touched(frame, touched, str(into), keys, len(self.batch.key))

        source = None
        if evolve and isinstance(into, str):
            source = Source("the frame", columns_of_frame(staging_types(frame.schema)))
        self._stage(into, keys, chosen, frame, marked_rows, source=source, evolve=evolve)

    def _stage(
        self,
        into: str | LakeTable,
        keys: tuple[str, ...],
        mode: Mode,
        shown: DataFrame,
        rows: Callable[[], DataFrame],
        *,
        copied: Copied | None = None,
        source: Source | None = None,
        evolve: bool = False,
    ) -> None:
        """Check that the schema of ``shown`` fits the target, then call ``rows`` and stage its result.

        If ``source`` is given, a table of PostgreSQL first gets changes of its columns. With ``evolve``, a table of a
        lake first gets the columns that it lacks.
        """
        if self.ended:
            raise MergeRefused(f"{into}: the batch_job() block has ended before this merge: merge inside it")
        results = self._work.results
        sink: TableSink | LakeSink
        if isinstance(into, str):
            sink = table_sink(
                results,
                self.batch,
                into,
                shown,
                key=keys,
                mode=mode,
                copied=copied,
                source=source,
                note=self._note,
            )
        else:
            sink = lake_sink(
                results, self.batch, into, shown, key=keys, mode=mode, evolve=evolve, note=self._note
            )
        frame = rows()
        self._note("staging", str(into))
        staged = self._staged(sink, frame)
        self.staged.append(staged)
        self._note(f"staged {into}", f"{staged.rows:,} rows")

    def _staged(self, sink: TableSink | LakeSink, frame: DataFrame) -> Result:
        """Stage a small frame from the driver, through its memory, and any other from the executors."""
        if self._small:
            taken = frame.limit(SMALL + 1).toArrow()
            if taken.num_rows <= SMALL:
                return sink.stage_small(taken)
        session.ship(self.spark)
        return sink.stage(frame)

    def _source(self, table: str, frame: DataFrame) -> Source:
        """Return the frame's columns as the table at the source declares them."""
        with connected(self._work.source, self.batch.lsn) as connection:
            return Source(table, columns_of_table(connection, table, frame.columns))

    def _is_small(self) -> bool:
        return self.batch.count < SMALL and session.makes_frames(self.spark)

    def _attached_to(self, feed: TubeFeed) -> Sequence[Attached]:
        with connected(self._work.source, self.batch.lsn) as connection:
            return Attached.all(feed.tube, ask(connection, feed.attached()))

    def _frame(self, read_options: ReadOptions) -> DataFrame:
        if not self._small:
            return self.spark.read.format(NAME).options(**read_options.options()).load()
        work = self._work
        reading = prepare(work.feed, self.batch, work.source, read_options, work.cluster)
        schema = reading.schema()
        batches = [batch for partition in reading.partitions(1) for batch in reading.read(partition)]
        table = pa.Table.from_batches(batches, schema=arrow_schema(schema))
        return self.spark.createDataFrame(table, schema=schema)
