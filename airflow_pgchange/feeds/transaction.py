"""The consumer transaction: lock, claim, process, write, ack and commit one batch, all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from airflow_pgchange.errors import (
    BatchNotFinished,
    ConnectionLost,
    ConsumerBusy,
    InvalidArgument,
    SchemaVersionMismatch,
    Stopped,
    TransactionNotClean,
    UnknownConsumer,
)
from airflow_pgchange.feeds import error_text, outputs, reading
from airflow_pgchange.feeds.argument_checks import BATCH_LIMIT, Seconds, patience
from airflow_pgchange.feeds.attempt_phases import Progress
from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.feeds.connections import begun, cancel, connect, keep_open, lasting
from airflow_pgchange.feeds.error_translation import is_of_the_batch, translated
from airflow_pgchange.feeds.feed import NOWHERE, Feed, Token, progress_at
from airflow_pgchange.feeds.periodic_thread import repeated
from airflow_pgchange.feeds.queries import ask, ask_each
from airflow_pgchange.feeds.retries import past_deadlocks, succeeds
from airflow_pgchange.feeds.sessions import Sessions
from airflow_pgchange.feeds.start_position import may_start, start

PING_EVERY = 10.0


class ConsumerTransaction:
    """A transaction for one batch of one feed. Results that are written through ``connection`` are exactly once.

    Use it as a context manager. While the batch is processed, the transaction holds only the consumer's advisory lock:
    no transaction id, no snapshot, no relation lock. It commits if the block ends after ``ack``, and otherwise rolls
    back. A block that ends without acking its batch raises BatchNotFinished. If the feed keeps its progress at the
    source, and the results are in another database, the results commit first. Such results are at least once.

    - ``results``, ``source``: libpq connection strings. ``source`` may name several servers of one group.
    - ``busy_timeout``: how long to wait for the lock; 0: not at all, None: as long as it takes.
    - ``stopped``: returns True if the caller wants to stop. The wait then ends, or the batch is rolled back, with
      Stopped.
    - ``hide``: removes secrets from the error of the block, besides those of the connection strings. The error is stored
      with the claim, for ``give_up``.
    - ``run``: the name of the run, for people who look at recent batches.
    - ``register``: register a new consumer, which starts where its feed says; False: raise UnknownConsumer instead.
    - ``sessions``: take the connections from there, and leave them for the next transaction; None: open and close them.

    The attribute ``progress`` has the current phase and step. If a lost server caused an error that looks like an error
    of the batch, set ``is_outage`` before the error leaves the block. A batch is never split because of an outage.
    """

    def __init__(
        self,
        feed: Feed,
        results: str,
        source: str | None = None,
        *,
        busy_timeout: Seconds | None = 0,
        stopped: Callable[[], bool] = lambda: False,
        hide: Callable[[str], str] = lambda text: text,
        run: str | None = None,
        register: bool = True,
        sessions: Sessions | None = None,
    ) -> None:
        self.feed = feed
        self.batch: Batch | None = None
        self.busy = False
        self.is_outage = False
        self.progress = Progress()
        self._results = results
        self._source = source or results
        self._busy_timeout = patience("busy_timeout", busy_timeout)
        self._stopped = stopped
        self._hide = hide
        self._run_setting = {} if run is None else {"pgchange.run": run}
        self._register = register
        self._connect = connect if sessions is None else sessions.connect
        self._acked = False
        self._is_leased = False
        self._open = ExitStack()
        self._stream: Generator[Change, None, None] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as opened, translated():
            self._reader = opened.enter_context(self._connect(self._source))
            # Turn JIT off: with many partitions it takes longer to compile the query of a batch than to run it.
            settings = {"jit": "off", **self._run_setting}
            _, self._on_standby = ask_each(
                self._reader,
                lasting(self._reader.info, **settings),
                sql.SQL("select pg_catalog.pg_is_in_recovery()"),
            )
            self._claims = self._reader
            if self._on_standby:
                self._claims = opened.enter_context(self._connect(self._source, primary=True))
                keep_open(self._claims, **settings)
            # The exit stack unwinds in reverse order, so results commit before the progress of the source. A crash
            # between the two repeats a batch, and never loses it.
            self._keeper = opened.enter_context(
                self._connect(progress_at(self.feed, self._results, self._source), primary=True)
            )
            if may_start(self._claims, self.feed, ask(self._keeper, self.feed.position())):
                start(self._keeper, self._claims, self.feed, self._register)
            opened.enter_context(begun(self._keeper))
            self.busy = not succeeds(self._try_lock, self._busy_timeout)
            self.connection = self._keeper
            if self.feed.progress == "source" and self._results != self._source:
                self.connection = opened.enter_context(self._connect(self._results, primary=True))
                opened.enter_context(begun(self.connection))
            opened.callback(self._close_stream)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(kind, error, trace)
        except Exception as failure:
            self._note(error or failure)
            raise
        self._note(error)

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception from outside, such as a timeout, a statement may still run. It would keep the lock.
        self.cancel()
        unfinished = kind is None and self.batch is not None and not self._acked and not self._is_leased
        if unfinished:
            error = BatchNotFinished(f"{self.feed.name}: the block ended without ack(), so nothing was kept")
            kind = BatchNotFinished
        try:
            with translated():
                self._open.__exit__(kind, error, trace)
        except BatchNotFinished:
            if not unfinished:
                raise
        if unfinished and error is not None:
            raise error

    def claim(
        self,
        limit: int = BATCH_LIMIT,
        max_attempts: int | None = None,
        *,
        split: bool = False,
        lease: Seconds | None = None,
        owner: str | None = None,
    ) -> Batch | None:
        """Return the next batch of at most ``limit`` changes, or None if nothing is ready.

        A batch that was claimed and not acked is returned again. Raises ConsumerBusy if another transaction holds the
        lock, and TransactionNotClean if this transaction has written. Raises UnknownConsumer if the consumer was
        dropped while this transaction waited, and BatchGivenUp if the batch has failed ``max_attempts`` times.

        With ``split``, a batch that has failed ``max_attempts`` times by its own content is split, and its first half
        is returned. Its other parts come next. PoisonousChange is raised for a change that has failed alone so often.
        BatchGivenUp is then raised only if no attempt failed by the content, or if ten changes of the whole batch are
        dead letters.

        With ``lease``, a length of time, the block may end without an ack. Nobody claims the batch again until the lease
        ends, and ``resume`` returns it to another transaction. Raises Leased if another attempt has a lease.

        ``owner`` is the name of the process that the lease is for. A lease of the same owner is ended first, because its
        earlier claim was lost. By default the owner is the run, and its leases are kept.
        """
        if limit < 1:
            raise InvalidArgument(f"limit must be at least 1 change, not {limit}")
        if self.busy:
            raise ConsumerBusy(f"{self.feed.name} is at work in another transaction")
        if self.batch is not None:
            raise BatchNotFinished(
                f"{self.feed.name}: a transaction has one batch: ack it, and claim the next in another transaction"
            )
        self.progress.begin("claim")
        with translated():
            position = self._read_position()
            choose = self.feed.choose(position, limit) if self._on_standby else None
            choice = None if choose is None else ask(self._reader, choose)
            claim = self.feed.claim(position, limit, choice, max_attempts, split=split)
            if lease is not None:
                if owner is not None:
                    ask(self._claims, self.feed.end_leases(owner))
                claim = self.feed.leased(claim, owner or self._run_setting.get("pgchange.run", ""), lease)
            row = past_deadlocks(lambda: ask(self._claims, claim))
        self.progress.begin("process")
        self.batch = None if row is None else self._batch(row)
        self._is_leased = lease is not None
        return self.batch

    def resume(self, token: Token) -> Batch:
        """Return the batch that was claimed with a lease, given its token, so that this transaction can ack it.

        Raises ConsumerBusy if another transaction holds the lock, StaleClaim if a later attempt has begun or the batch
        has ended.
        """
        if self.busy:
            raise ConsumerBusy(f"{self.feed.name} is at work in another transaction")
        with translated():
            row = ask(self._claims, self.feed.resume(self._read_position(), token))
        self.batch = self._batch(row)
        return self.batch

    def _batch(self, row: Mapping[str, Any]) -> Batch:
        return Batch.from_json({**row, "feed": self.feed.name, "atomic": self.connection is self._keeper})

    def keep_lease(self) -> None:
        """Let the block end without an ack, after ``resume``. The lease stays."""
        self._claimed()
        self._is_leased = True

    def release(self, error: str | None = None, of_batch: bool | None = None) -> None:
        """End the lease of the batch that ``resume`` returned, and store the error of its attempt.

        If ``of_batch`` is None, an error that the attempt has stored itself is kept.
        """
        self.keep_lease()
        batch = self._claimed()
        with translated():
            if error is not None and (
                of_batch is not None or self._outcome_at_source(batch.token) != "failed"
            ):
                ask(self._claims, self.feed.note_failure(batch, error, of_batch))
            ask(self._claims, self.feed.end_lease(batch.token))

    def _outcome_at_source(self, token: Token) -> str | None:
        outcome: str | None = ask(self._claims, self.feed.outcome(token))
        return outcome

    def give_up(self, reason: str, batch_id: str | None = None) -> int:
        """Make the batch that was claimed and not acked a dead letter, and return the letter's number.

        The letter has the error of the last attempt. The consumer moves past the batch when the block ends. With
        ``batch_id`` no other batch is given up. Raises BatchNotFinished if there is no such batch.
        """
        if self.busy:
            raise ConsumerBusy(f"{self.feed.name} is at work in another transaction")
        if self.batch is not None:
            raise BatchNotFinished(f"{self.feed.name}: give a batch up in a transaction of its own")
        with translated():
            row = ask(self._claims, self.feed.in_work(self._read_position()))
            if row is None or batch_id not in (None, row["id"]):
                raise BatchNotFinished(f"{self.feed.name} has no such batch in work that could be given up")
            return int(ask(self._keeper, self.feed.skip(row, reason)))

    def changes(self) -> Iterator[Change]:
        """Stream the claimed batch's changes from the source, in order. Each call begins with the first change."""
        self._close_stream()
        batch = self._claimed()
        # A primary has all changes. Only a standby may have to replay some of them first.
        readable = batch if self._on_standby else replace(batch, lsn=None)
        self._stream = self.progress.counted(reading.changes(self._reader, self.feed, readable), batch.count)
        return self._stream

    @property
    def results(self) -> str:
        """The connection string of the results. It is secret."""
        return self._results

    @property
    def reader(self) -> psycopg.Connection[Any]:
        """The connection on which to read tables of the source: after ``changes`` its server has what the batch changed.

        It is the connection of the results if these are in the same database, so that reads and writes are one
        transaction.
        """
        return self.connection if self._source == self._results else self._reader

    def ack(self, write: Callable[[psycopg.Connection[Any]], object] | None = None) -> None:
        """Call ``write`` with the connection, and record the batch as processed.

        Both happen in a savepoint and are retried after a deadlock, so ``write`` may be called more than once. Raises
        StaleClaim if the consumer was moved in the meantime.
        """
        batch = self._claimed()

        def write_and_ack() -> None:
            self._acked = False
            self.progress.begin("process")
            is_one = self.connection is self._keeper
            with self._keeper.transaction(), nullcontext() if is_one else self.connection.transaction():
                if write is not None:
                    write(self.connection)
                if not batch.atomic:
                    outputs.carry(self.connection, self._keeper)
                self._stop_if_asked()
                worked = replace(batch, seconds=self.progress.seconds)
                self.progress.begin("ack")
                with translated():
                    self._keeper.execute(self.feed.ack(worked))
                # Set this inside the block. After it, a psycopg.Rollback that ``write`` raised would go unnoticed.
                self._acked = True

        past_deadlocks(write_and_ack)

    @contextmanager
    def kept_alive(self, on_lost: Callable[[], None], poll_interval: Seconds = PING_EVERY) -> Iterator[None]:
        """Ping the connection every ``poll_interval`` while the block does work that does not use it.

        If the connection is lost, ``on_lost`` is called once, and the end of the block raises ConnectionLost.
        """
        lost = threading.Event()

        def ping() -> bool:
            try:
                self.ping()
            except ConnectionLost:
                lost.set()
                on_lost()
                return False
            return True

        try:
            with repeated(ping, poll_interval, "pgchange-ping"):
                yield
        finally:
            if lost.is_set():
                raise ConnectionLost(
                    f"{self.feed.name}: the consumer's connection ended while the batch was in work"
                )

    def ping(self) -> None:
        """Raise ConnectionLost if the transaction was lost. Keeps no snapshot."""
        try:
            for connection in {self._keeper, self.connection}:
                connection.execute("select 1")
        except psycopg.Error as error:
            raise ConnectionLost(f"{self.feed.name}: {str(error).strip()}") from error

    def cancel(self) -> None:
        """Cancel the running statements of the transaction. Can be called from another thread or a signal handler."""
        for connection in {self._keeper, self.connection}:
            cancel(connection)

    def _note(self, error: BaseException | None) -> None:
        """Store the error with the claim. Called after the transaction ended, because its ack may have locked the
        claim."""
        if self.batch is not None and isinstance(error, Exception) and not isinstance(error, Stopped):
            text = error_text.described(error, (self._results, self._source))
            batch = replace(self.batch, seconds=self.progress.seconds)
            error_text.note(
                self.feed, self._source, batch, text, hide=self._hide, of_batch=self.blames_batch(error)
            )

    def blames_batch(self, error: Exception) -> bool:
        """Whether the content of the batch may have caused the error of the block."""
        return not self.is_outage and is_of_the_batch(error)

    def _close_stream(self) -> None:
        """Close the stream of changes: if it was not read to its end, it holds psycopg's lock on the connection."""
        if self._stream is not None:
            self._stream.close()

    def _claimed(self) -> Batch:
        if self.batch is None:
            raise BatchNotFinished(f"{self.feed.name}: claim a batch first")
        return self.batch

    def _try_lock(self) -> bool:
        """Try to take the lock, in a savepoint: a lock may consist of several, and a failed attempt must keep none of
        them."""
        _, is_taken = ask_each(self._keeper, sql.SQL("savepoint pgchange_lock"), self.feed.lock())
        if is_taken:
            self._keeper.execute("release savepoint pgchange_lock")
            return True
        self._keeper.execute("rollback to savepoint pgchange_lock; release savepoint pgchange_lock")
        self._stop_if_asked()
        return False

    def _stop_if_asked(self) -> None:
        if self._stopped():
            raise Stopped(f"{self.feed.name}: stopped before the batch was committed, so it was rolled back")

    def _read_position(self) -> dict[str, Any]:
        """Read the position in a savepoint that is rolled back, so that no relation lock and no snapshot is kept.

        All in one round trip, because each costs as much as the query.
        """
        try:
            _, has_written, position, *_ = ask_each(
                self._keeper,
                sql.SQL("savepoint pgchange_position"),
                sql.SQL("select pg_catalog.pg_current_xact_id_if_assigned() is not null"),
                self.feed.position(),
                sql.SQL("rollback to savepoint pgchange_position"),
                sql.SQL("release savepoint pgchange_position"),
            )
        except Exception:
            if self._keeper.info.transaction_status is TransactionStatus.INERROR:
                self._keeper.execute("rollback to savepoint pgchange_position")
            raise
        if has_written:
            raise TransactionNotClean(f"{self.feed.name}: claim before the transaction writes anything")
        if position is None:
            # The feed's own query may raise a more exact error, such as for another number of workers.
            ask(self._reader, self.feed.lag(NOWHERE, 1))
            raise UnknownConsumer(
                f"{self.feed.name} was dropped, or given up before it began, while this transaction waited: open another"
            )
        if position["schema"] != self.feed.schema_version:
            raise SchemaVersionMismatch(
                f"the database holds version {position['schema']} of the schema for {self.feed.kind} feeds, this "
                f"package needs {self.feed.schema_version}: run `airflow-pgchange upgrade`, or install the package "
                f"that fits"
            )
        return dict(position)
