"""What a Spark application uses: ``with batch_job() as job``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from psycopg import sql
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DoubleType, FloatType, StringType, StructField, StructType

from airflow_pgchange.feeds.attached import Attached
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connect import connect
from airflow_pgchange.feeds.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.feed import Feed, shards
from airflow_pgchange.feeds.merge import validate, write_manifest
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.queue import QueueFeed
from airflow_pgchange.feeds.reading import connected
from airflow_pgchange.feeds.staging import TOUCHED, Staged, checked_mode, create
from airflow_pgchange.feeds.target import look_up
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.spark import request, sink
from airflow_pgchange.spark.installed import check_versions
from airflow_pgchange.spark.misfits import Rows
from airflow_pgchange.spark.parent import follow_parent
from airflow_pgchange.spark.request import Request
from airflow_pgchange.spark.source import NAME, data_source, prepare
from airflow_pgchange.spark.types import staging_types
from airflow_pgchange.spark.wanted import PATIENCE, Rule, Wanted

__all__ = ["Attached", "Job", "batch_job"]

SHARD = "shard"
"""The column of a copy of several tables' rows that says which table a row is of."""
SMALL = 20_000
"""Changes below which the driver reads a batch itself, and rows up to which it stages its results: a data source costs
seconds to start."""
EVENT_COLUMNS = ("event_id", "topic")
CORRUPT = "pgchange_corrupt"
TEXTS = "map<string,string>"


class Job:
    """One batch, in a Spark session. Made by ``batch_job``."""

    def __init__(self, spark: SparkSession, request: Request) -> None:
        self.spark = spark
        self.feed: Feed = request.feed
        self.batch: Batch = request.batch
        self.staged: list[Staged] = []
        self.ended = False
        self._request = request
        self._small = request.batch.count < SMALL
        if not self._small:
            parallelism = spark.sparkContext.defaultParallelism
            spark.dataSource.register(
                data_source(request.feed, request.batch, request.source, parallelism, request.cluster)
            )

    def attached(self) -> list[Attached]:
        """The tables that touch the tube, in the shards that this batch has changes of; only of a tube's batch.

        One that was detached is not among them, though ids of it may be in the batch: nobody keeps its copy any more, and
        when it is attached again it needs a backfill.
        """
        feed = self.feed
        if not isinstance(feed, TubeFeed):
            raise InvalidArgument(f"{feed.name} is a {feed.kind} feed: tables are attached to tubes")
        with connected(self._request.source, self.batch.lsn) as connection:
            every = Attached.all(feed.tube, ask(connection, feed.attached()))
        of_batch = self.shards()
        return [attached for attached in every if attached.shard in of_batch]

    def shards(self) -> list[int]:
        """The shards that the batch has changes of, for feeds that have shards."""
        return shards(self.feed, self.batch)

    def changes(self, shard: int | None = None) -> DataFrame:
        """The batch's changes, one row each, in the feed's own columns; ``id`` is the key of the row that changed.

        ``shard``, here and below: only those of one shard.
        """
        return self._frame(Wanted(shard=shard))

    def payloads(self, schema: str | StructType) -> DataFrame:
        """The batch's events with their payloads as columns: ``event_id``, ``topic``, and the fields of ``schema``.

        The schema is Spark's, or its DDL such as ``"carrier string, delay int"``. A field that a payload lacks is null;
        a payload that does not fit fails what reads the frame, with the event's id. Within a field of fields Spark takes
        a number that is too large for a ``float`` or ``double`` as infinity. Take the payload as JSON from ``changes()``
        where it has no schema. Only of an event log's batch; raises InvalidArgument.
        """
        if not isinstance(self.feed, EventFeed):
            raise InvalidArgument(f"{self.feed.name} is a {self.feed.kind} feed: only events have payloads")
        fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        if not isinstance(fields, StructType):
            raise InvalidArgument(f"{schema!r} says no fields: write it as 'carrier string, delay int'")
        taken = sorted({*EVENT_COLUMNS, CORRUPT} & {name.lower() for name in fields.names})
        if taken:
            raise InvalidArgument(
                f"a column of the frame is called {taken[0]} already: take that field with "
                "from_json of the payload in changes()"
            )
        checked = StructType([*fields.fields, StructField(CORRUPT, StringType())])
        parsed = f.from_json("payload", checked, {"columnNameOfCorruptRecord": CORRUPT})
        problem = f.concat(
            f.lit("the payload of event "), "id", f.lit(f" does not fit {fields.simpleString()}: "), "payload"
        )
        fits = parsed[CORRUPT].isNull() & ~_too_large(parsed, fields)
        fitting = f.when(fits, parsed).otherwise(f.raise_error(problem))
        frame = self.changes().select(f.col("id").alias("event_id"), "topic", fitting.alias("payload"))
        return frame.select(*EVENT_COLUMNS, *(f.col("payload")[name].alias(name) for name in fields.names))

    def messages(self) -> DataFrame:
        """The batch's messages: ``id`` (the iid), ``data``, ``properties`` and ``headers`` as maps of text, ``added``.

        A null in a message is a null in its map. Only of a queue's batch; raises InvalidArgument.
        """
        if not isinstance(self.feed, QueueFeed):
            raise InvalidArgument(f"{self.feed.name} is a {self.feed.kind} feed: only queues have messages")
        maps = [f.from_json(name, TEXTS).alias(name) for name in ("data", "properties", "headers")]
        return self.changes().select("id", *maps, "added")

    def rows(
        self,
        table: str | Attached,
        key: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        shard: int | None = None,
    ) -> DataFrame:
        """The rows of ``table`` that the changes name, as they are now: one for each change, none where it is gone.

        ``key`` is the column that holds the changes' ids, and is always among the columns. A row that was changed twice
        comes twice; so does one whose commit was approved twice. Of a large batch the frame is lazy and is read again
        each time it is used: ``cache()`` what is used twice. Raises UnsupportedType for a column, by name, that cannot
        be read exactly; ``columns`` leaves it out. Raises PermissionDenied where row security hides rows.

        Of an ``Attached`` the key and the shard are known, and a row for which the tube's predicate does not hold counts
        as gone; one for which it fails does not. The predicate runs with the rights of the table's owner, who grants the
        source's role ``execute`` on it.
        """
        chosen = None if columns is None else tuple(columns)
        return self._frame(_wanted(table, key, shard, columns=chosen))

    def routed(
        self,
        table: str,
        key: str,
        bucket: str,
        columns: Sequence[str] | None = None,
        *,
        tier: str = "default",
        shard: int | None = None,
        patience: float = PATIENCE,
    ) -> DataFrame:
        """``rows`` of a table that is spread over a cluster: each range of buckets is read from the master that the
        cluster's catalogue names, which is asked again where a read fails or the range has another owner by then; what
        was read of it is thrown away first, so that no row comes twice.

        ``bucket`` is the table's rule, an SQL expression over a row such as ``"account_id % 3000"``, always the same for
        one row. Raises InvalidArgument for buckets that nobody owns and where the operator was given no catalogue;
        BatchIncomplete once a range could not be read for ``patience`` seconds.
        """
        chosen = None if columns is None else tuple(columns)
        return self._frame(Wanted(table, key, chosen, shard=shard, rule=Rule(bucket, tier, patience)))

    def gone(self, table: str | Attached, key: str | None = None, *, shard: int | None = None) -> DataFrame:
        """The changes whose row is not in ``table`` any more: their ids, in the column ``id``. ``Attached``: as above."""
        return self._frame(_wanted(table, key, shard, gone=True))

    def mirror(self, attached: Attached, into: str, columns: Sequence[str] | None = None) -> None:
        """Bring the copy of an attached table up to date: ``merge`` in mode ``mirror`` of its rows.

        In ``into`` ``{tube}`` and ``{table}`` stand for the names of the tube and of the table. What the copy generates
        itself is left out. A shared copy is of several tables' rows, or was before the others were dropped: it has a
        column ``shard``, and its key is (shard, id).

        Raises MergeRefused where the copy lacks a column of the table. Raises InvalidArgument where a shared copy lacks
        that column or key, and where another table has the same name and shard, so that no copy could tell their rows
        apart. Raises PermissionDenied where what is filled in names a table that the owner of the tube's pods may not
        write, or whose owner could have code run here.
        """
        with connect(self._request.results, primary=True) as connection:
            copy = attached.copy_in(connection, into)
            target = look_up(connection, copy)
        made = [name for name, column in target.columns.items() if column.generated]
        frame, key = self.rows(attached, columns=columns).drop(*made), [attached.id_column]
        types = staging_types(frame.schema)
        if lacking := [name for name in types if name not in target.columns]:
            added = sql.SQL(", ").join(
                sql.SQL("add column {} {}").format(sql.Identifier(name), sql.SQL(types[name]))
                for name in lacking
            )
            alter = sql.SQL("alter table {} {}").format(target.identifier, added).as_string(None)
            raise MergeRefused(
                f"{copy} lacks columns of {attached.table}: run `{alter}`, and backfill the table if they "
                "are to hold what was there before; or choose what to copy with columns="
            )
        if attached.shared or target.is_of_shards(SHARD, attached.id_column):
            target.check_shards(SHARD, attached.id_column)
            if SHARD in map(str.lower, frame.columns):
                raise InvalidArgument(
                    f'{attached.table} has a column "{SHARD}" of its own, which {copy} needs for the tables\' shards: '
                    "leave it out with columns=, or merge rows() into a copy of your own design"
                )
            frame, key = frame.withColumn(SHARD, f.lit(attached.shard)), [SHARD, *key]
        self.merge(frame, into=copy, key=key, mode="mirror", shard=attached.shard)

    def merge(
        self,
        frame: DataFrame,
        into: str,
        key: str | Sequence[str],
        mode: str,
        *,
        shard: int | None = None,
    ) -> None:
        """Stage ``frame`` now, for the operator to merge into the table ``into`` in the consumer transaction.

        ``add``: numbers are summed for each key and added to what is there; right only over rows that never change,
        such as a commit's own. ``replace``: a row for each key, inserted or overwritten. ``mirror``: ``key`` is the id
        that changes name, behind other columns of theirs if there are any, such as ``["shard", "id"]``; rows are inserted
        or overwritten, and ids of the batch (with ``shard``, of that shard) that the frame lacks are deleted.
        ``append``: rows are inserted. Only the frame's columns are written, rounded to the target's scale as in any
        insert, but for keys and for what is added: a sum that is rounded where a batch ends depends on where that is, and
        only the last digits of a ``double precision`` may. Raises MergeRefused, before any work is done, if the frame
        does not fit or the block has ended.
        """
        if self.ended:
            raise MergeRefused(f"{into}: the batch_job() block has ended without this: merge inside it")
        chosen, results = checked_mode(mode), self._request.results
        keys = (key,) if isinstance(key, str) else tuple(key)
        columns = staging_types(frame.schema)
        with connect(results, primary=True) as connection:
            validate(connection, into, keys, chosen, columns)
            table = create(connection, self.batch, into, list(columns.items()))
        if chosen == "mirror":
            frame = self._with_touched(frame, into, keys, shard)
        rows = Rows(into, keys)
        winners = sink.stage_small(frame, results, table, SMALL, rows) if self._small else None
        if winners is None:
            winners = sink.stage(frame, results, table, rows)
        self.staged.append(
            Staged(
                target=into,
                key=keys,
                mode=chosen,
                table=table,
                columns=tuple(columns.items()),
                winners=winners,
                batch_id=self.batch.id,
                attempt=self.batch.attempt,
            )
        )

    def _with_touched(
        self, frame: DataFrame, into: str, keys: tuple[str, ...], shard: int | None
    ) -> DataFrame:
        """The frame and, marked, every id of the batch that the key can hold: what is then without a row is gone."""
        named = {**{name: name for name in keys[:-1]}, keys[-1]: "id"}
        changes = self.changes(shard)
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
        return frame.withColumn(TOUCHED, f.lit(False)).unionByName(touched)

    def _frame(self, wanted: Wanted) -> DataFrame:
        if not self._small:
            return self.spark.read.format(NAME).options(**wanted.options()).load()
        request = self._request
        reading = prepare(request.feed, self.batch, request.source, wanted, request.cluster)
        schema = reading.schema()
        batches = [batch for partition in reading.partitions(1) for batch in reading.read(partition)]
        table = pa.Table.from_batches(batches, schema=to_arrow_schema(schema, timezone="UTC"))
        return self.spark.createDataFrame(table, schema=schema)


def _too_large(parsed: Column, fields: StructType) -> Column:
    """Whether a number of the payload has become infinity; a text that says infinity, as PostgreSQL writes it, may."""
    names = [field.name for field in fields if isinstance(field.dataType, FloatType | DoubleType)]
    written = f.from_json("payload", StructType([StructField(name, StringType()) for name in names]))
    found = f.lit(False)
    for name in names:
        number = (f.abs(parsed[name]) == float("inf")) & written[name].rlike("[0-9]")
        found = found | f.coalesce(number, f.lit(False))
    return found


def _wanted(
    table: str | Attached,
    key: str | None,
    shard: int | None,
    *,
    columns: tuple[str, ...] | None = None,
    gone: bool = False,
) -> Wanted:
    if isinstance(table, str):
        return Wanted(table, key, columns, gone, shard)
    return Wanted(
        table.table,
        key or table.id_column,
        columns,
        gone,
        table.shard if shard is None else shard,
        table.tube if table.predicate is not None else None,
    )


@contextmanager
def batch_job(app_name: str = "pgchange") -> Iterator[Job]:
    """The batch that the operator handed to this application, in a Spark session.

    What is merged in the block counts only if the block ends without an error and the operator's transaction commits.
    This process ends when the operator does. Raises InvalidArgument where no batch was handed over, VersionsDiffer where
    Spark is installed in two versions over each other.
    """
    check_versions()
    follow_parent()
    taken = request.take()
    spark = SparkSession.builder.appName(app_name).getOrCreate()
    job = Job(spark, taken)
    yield job
    job.ended = True
    write_manifest(taken.manifest, job.staged)
