"""What a Spark application uses: ``with batch_job() as job``, or ``for job in batch_jobs()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import Seconds, seconds
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.feed import Feed, shards
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.queue import QueueFeed
from airflow_pgchange.feeds.reading import connected
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached import Attached
from airflow_pgchange.results.merge import validate, write_manifest
from airflow_pgchange.results.modes import Mode
from airflow_pgchange.results.staging import TOUCHED, Copied, Staged, create
from airflow_pgchange.results.target import look_up
from airflow_pgchange.spark import request, session, sink
from airflow_pgchange.spark.installed import check_versions
from airflow_pgchange.spark.mirror import as_copied, marked, with_touched
from airflow_pgchange.spark.misfits import Rows
from airflow_pgchange.spark.notes import Notes
from airflow_pgchange.spark.parent import follow_parent
from airflow_pgchange.spark.payloads import columns_of_messages, columns_of_payloads
from airflow_pgchange.spark.read_options import PATIENCE, Rule, Wanted
from airflow_pgchange.spark.request import Request
from airflow_pgchange.spark.source import NAME, data_source, prepare
from airflow_pgchange.spark.types import staging_types

SMALL = 50_000
"""Changes below which the driver reads a batch itself, and rows up to which it stages its results: a data source costs
seconds to start. Beside a warm server, on two cores that others used too, the driver took of the time of executors, in
the first batch of a session and in the second: at 5,000 changes 0.27 and 1.01, at 20,000 0.27 and 0.66, at 50,000 0.28
and 0.73, at 100,000 0.37 and 1.21 (``python -m tests.benchmarks spark_start``)."""


class Job:
    """One batch, in a Spark session. Made by ``batch_job`` and ``batch_jobs``."""

    def __init__(
        self,
        spark: SparkSession,
        request: Request,
        note: Callable[[str, str], None] = lambda step, how_far: None,
    ) -> None:
        self.spark = spark
        self.feed: Feed = request.feed
        self.batch: Batch = request.batch
        self.staged: list[Staged] = []
        self.ended = False
        self._request = request
        self._note = note
        self._small = self._is_small()
        if not self._small:
            session.ship(spark)
            parallelism = session.parallelism(spark)
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
        of_batch = self.shards()
        return [attached for attached in self._attached_to(feed) if attached.shard in of_batch]

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
        return columns_of_payloads(self.changes(), schema)

    def messages(self) -> DataFrame:
        """The batch's messages: ``id`` (the iid), ``data``, ``properties`` and ``headers`` as maps of text, ``added``.

        A null in a message is a null in its map. Only of a queue's batch; raises InvalidArgument.
        """
        if not isinstance(self.feed, QueueFeed):
            raise InvalidArgument(f"{self.feed.name} is a {self.feed.kind} feed: only queues have messages")
        return columns_of_messages(self.changes())

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
        return self._frame(Wanted.of(table, key, shard, columns=columns))

    def routed(
        self,
        table: str,
        key: str,
        bucket: str,
        columns: Sequence[str] | None = None,
        *,
        tier: str = "default",
        shard: int | None = None,
        timeout: Seconds = PATIENCE,
    ) -> DataFrame:
        """``rows`` of a table that is spread over a cluster: each range of buckets is read from the master that the
        cluster's catalogue names, which is asked again where a read fails or the range has another owner by then; what
        was read of it is thrown away first, so that no row comes twice.

        ``bucket`` is the table's rule, an SQL expression over a row such as ``"account_id % 3000"``, always the same for
        one row. Raises InvalidArgument for buckets that nobody owns and where the operator was given no catalogue;
        BatchIncomplete once a range could not be read for ``timeout``.
        """
        chosen = None if columns is None else tuple(columns)
        return self._frame(
            Wanted(table, key, chosen, shard=shard, rule=Rule(bucket, tier, seconds("timeout", timeout)))
        )

    def gone(self, table: str | Attached, key: str | None = None, *, shard: int | None = None) -> DataFrame:
        """The changes whose row is not in ``table`` any more: their ids, in the column ``id``. ``Attached``: as above."""
        return self._frame(Wanted.of(table, key, shard, which="gone"))

    def mirror(
        self,
        table: str | Attached,
        into: str,
        columns: Sequence[str] | None = None,
        *,
        key: str | None = None,
        shard: int | None = None,
    ) -> None:
        """Bring the copy of a table up to date: what ``merge`` in mode ``mirror`` does with its ``rows``, which are read
        and staged together with the ids that have none any more.

        Of an ``Attached``, ``{tube}`` and ``{table}`` in ``into`` stand for the names of the tube and of the table. What
        the copy generates itself is left out. A shared copy is of several tables' rows, or was before the others were
        dropped: it has a column ``shard``, and its key is (shard, id).

        Raises MergeRefused where the copy lacks a column of the table. Raises InvalidArgument where a shared copy lacks
        that column or key, and where another table has the same name and shard, so that no copy could tell their rows
        apart. Raises PermissionDenied where what is filled in names a table that the owner of the tube's pods may not
        write, or whose owner could have code run here.
        """
        if isinstance(table, Attached) and (key is not None or shard is not None):
            raise InvalidArgument(
                f"{table.table}: of an attached table the key and the shard are known: leave them out"
            )
        wanted = Wanted.of(table, key, shard, columns=columns, which="every")
        with connect(self._request.results, primary=True) as connection:
            copy = into if isinstance(table, str) else table.copy_in(connection, into)
            target = look_up(connection, copy)
        assert wanted.key is not None
        made = [name for name, column in target.columns.items() if column.generated]
        frame = marked(self._frame(wanted), wanted.key).drop(*made)
        keys: tuple[str, ...] = (wanted.key,)
        copied = None
        if not isinstance(table, str):
            copied = Copied(*table.parts, tuple(name for name in frame.columns if name != TOUCHED))
            frame, keys = as_copied(frame, table, target)
        self._stage(copy, keys, Mode.MIRROR, frame.drop(TOUCHED), lambda: frame, copied=copied)

    def merge(
        self,
        frame: DataFrame,
        into: str,
        key: str | Sequence[str],
        mode: Mode | str,
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
        only the last digits of a ``double precision`` may. ``mode`` is a ``Mode`` or its name. Raises InvalidArgument for
        another name, and MergeRefused, before any work is done, if the frame does not fit or the block has ended.
        """
        keys, chosen = (key,) if isinstance(key, str) else tuple(key), Mode.of(mode)

        def marked_rows() -> DataFrame:
            if not chosen.behaviour.deletes_touched:
                return frame
            return with_touched(frame, self.changes(shard), into, keys)

        self._stage(into, keys, chosen, frame, marked_rows)

    def _stage(
        self,
        into: str,
        keys: tuple[str, ...],
        mode: Mode,
        shown: DataFrame,
        rows: Callable[[], DataFrame],
        *,
        copied: Copied | None = None,
    ) -> None:
        """Stage ``rows``, which are asked for once it is known that what is ``shown`` of them fits."""
        if self.ended:
            raise MergeRefused(f"{into}: the batch_job() block has ended without this: merge inside it")
        results, columns = self._request.results, staging_types(shown.schema)
        with connect(results, primary=True) as connection:
            validate(connection, into, keys, mode, columns)
            table = create(connection, self.batch, into, list(columns.items()))
        frame, target = rows(), Rows(into, keys)
        self._note("staging", into)
        winners = sink.stage_small(frame, results, table, SMALL, target) if self._small else None
        if winners is None:
            session.ship(self.spark)
            winners = sink.stage(frame, results, table, target)
        staged = Staged(
            target=into,
            key=keys,
            mode=mode,
            table=table,
            columns=tuple(columns.items()),
            winners=winners,
            batch_id=self.batch.id,
            attempt=self.batch.attempt,
            copied=copied,
        )
        self.staged.append(staged)
        self._note(f"staged {into}", f"{staged.rows:,} rows")

    def _is_small(self) -> bool:
        return self.batch.count < SMALL

    def _attached_to(self, feed: TubeFeed) -> Sequence[Attached]:
        with connected(self._request.source, self.batch.lsn) as connection:
            return Attached.all(feed.tube, ask(connection, feed.attached()))

    def _frame(self, wanted: Wanted) -> DataFrame:
        if not self._small:
            return self.spark.read.format(NAME).options(**wanted.options()).load()
        request = self._request
        reading = prepare(request.feed, self.batch, request.source, wanted, request.cluster)
        schema = reading.schema()
        batches = [batch for partition in reading.partitions(1) for batch in reading.read(partition)]
        table = pa.Table.from_batches(batches, schema=to_arrow_schema(schema, timezone="UTC"))
        return self.spark.createDataFrame(table, schema=schema)


@contextmanager
def batch_job() -> Iterator[Job]:
    """The batch that the operator handed to this application, in a Spark session.

    What is merged in the block counts only if the block ends without an error and the operator's transaction commits.
    This process ends when the operator does. Raises InvalidArgument where no batch was handed over, VersionsDiffer where
    Spark is installed in two versions over each other, or the server that the session is on has another.
    """
    with _worked(_first()) as job:
        yield job


def batch_jobs() -> Iterator[Job]:
    """The operator's batches, one after another, in one process and one Spark session: ``for job in batch_jobs():``.

    The body is to each batch what a ``batch_job()`` block is; when it has ended the operator commits, and claims the next
    one, as long as its ``max_batches`` and ``until`` allow. A body that is left by ``break`` has not processed its batch.
    What a body leaves cached, or sets in the session, the next batch finds there. Raises what ``batch_job`` does.
    """
    taken: Request | None = _first()
    while taken is not None:
        with _worked(taken) as job:
            yield job
        taken = request.take_next()


def _first() -> Request:
    check_versions()
    follow_parent()
    return request.take()


@contextmanager
def _worked(taken: Request) -> Iterator[Job]:
    spark, notes = session.opened(), Notes(taken.manifest)
    notes.add("reading", f"{taken.batch.count:,} changes")
    job = Job(spark, taken, notes.add)
    with session.followed(spark, notes.add):
        yield job
    job.ended = True
    write_manifest(taken.manifest, job.staged)
