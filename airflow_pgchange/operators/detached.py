"""A batch that other tasks of the DAG process: one task claims it, one acks it, and one releases it if it failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from airflow.providers.common.compat.sdk import AirflowSkipException, TaskGroup

from airflow_pgchange import detached
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.operators.claim import ConsumerOperator
from airflow_pgchange.operators.lease import LeasingOperator, ack_batch
from airflow_pgchange.results.manifests import merge_kept
from airflow_pgchange.results.staging import Result
from airflow_pgchange.utils.arguments import Check, FeedLike, checks, feed_of, function, maybe, text

if TYPE_CHECKING:
    from airflow.sdk import Context, XComArg

Write = Callable[[psycopg.Connection[Any]], object]


class ClaimBatchOperator(LeasingOperator):
    """Claims the next batch of a feed with a lease, and returns the text of its handle.

    No connection or transaction stays open after the task. If nothing is ready, the task is skipped, with the tasks
    after it. While another run has a lease, the task waits, is skipped or fails, as ``on_busy`` says. If the task is
    tried again or cleared, it gets the same batch with the next attempt, without waiting for its own lease. The further
    arguments are those of ClaimingOperator.

    :param lease: how long the batch is not claimed again, unless the lease is renewed (templated)
    :param deferrable: wait for another run in the triggerer, without a worker slot; default: the value of ``[operators]
        default_deferrable``
    """

    def execute(self, context: Context) -> str:
        """Return the text of the handle."""
        feed = feed_of(self.feed)
        handle, done = self._claim(feed, context)
        if handle is None:
            why = "is at work in another run" if done.busy else "has nothing that is ready"
            raise AirflowSkipException(f"{feed.name} {why}")
        return str(handle)


class AckBatchOperator(ConsumerOperator):
    """Writes the results of a detached batch, and records the batch as processed, in one short transaction.

    Guarantee for these results: that of the other operators, exactly once. If another attempt on the batch has begun, the
    task fails with StaleClaim, and nothing is written. If this attempt was acked before, the task succeeds and writes
    nothing. With an outlet of ``airflow_pgchange.target_tables`` each table that it wrote is an asset.

    :param handle: the result of ClaimBatchOperator (templated)
    :param staged: merge the results that the application staged in ``batch_job(handle)``. The task fails if no
        application has finished its block. Default: True, unless there is ``write``
    :param write: a function that writes results, called as ``write(connection)`` with the connection of the results. It
        must neither commit nor roll back
    """

    arguments: ClassVar[Mapping[str, Check]] = {**ConsumerOperator.arguments, **checks("handle")}
    template_fields: Sequence[str] = tuple(arguments)
    shallow_copy_attrs: Sequence[str] = ("write",)

    def __init__(
        self, *, handle: str | XComArg, staged: bool | None = None, write: Write | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.handle: Any = handle
        self.staged = write is None if staged is None else staged
        self.write = None if write is None else function("write", write)

    def execute(self, context: Context) -> dict[str, Any]:
        """Return ``{feed, batch_id, changes, acked_before}``."""
        handle = Handle.from_text(self.handle)

        def write(batch: Batch, connection: psycopg.Connection[Any]) -> Sequence[Result]:
            staged = merge_kept(connection, batch) if self.staged else ()
            if self.write is not None:
                self.write(connection)
            return staged

        acked = ack_batch(self, handle, context, write)
        return {
            "feed": handle.feed.name,
            "batch_id": handle.batch_id,
            "changes": handle.count,
            "acked_before": not acked,
        }

    def on_kill(self) -> None:
        """Stop before the commit."""
        self._stop.ask()


class ReleaseBatchOperator(ConsumerOperator):
    """Ends the lease of a detached batch that was not acked, so that the next claim returns the batch again.

    The tasks that failed are stored as the error of the attempt, unless the application has stored its own. The task is
    skipped if there is no batch, if it was acked, or if another attempt has begun.

    :param handle: the result of ClaimBatchOperator, or None (templated)
    """

    arguments: ClassVar[Mapping[str, Check]] = {**ConsumerOperator.arguments, "handle": maybe(text)}
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(self, *, handle: str | XComArg | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.handle: Any = handle

    def execute(self, context: Context) -> None:
        if not self.handle:
            raise AirflowSkipException("no batch was claimed")
        handle = Handle.from_text(self.handle)
        if not detached.release(handle, *self._conninfos(), error=self._error(context)):
            raise AirflowSkipException(
                f"{handle.feed.name}: batch {handle.batch_id} has ended, or another run has it"
            )
        self.log.info("%s: batch %s can be claimed again", handle.feed.name, handle.batch_id)

    def _error(self, context: Context) -> str:
        failed = ", ".join(self._failed_tasks(context)) or "none that is known"
        return f"tasks that failed in run {context['run_id']} of DAG {context['dag'].dag_id}: {failed}"

    def _failed_tasks(self, context: Context) -> list[str]:
        ti = context["ti"]
        states = ti.get_task_states(
            dag_id=ti.dag_id,
            task_ids=sorted(self.upstream_task_ids),
            run_ids=[ti.run_id],
            map_index=None if ti.map_index in (None, -1) else ti.map_index,
        )
        return sorted(name for name, state in states.get(ti.run_id, {}).items() if state == "failed")


@dataclass(frozen=True)
class ClaimedBatch:
    """The batch of a ``claimed_batch`` block. ``handle`` is its text, for any templated argument of a task; ``group`` has
    all its tasks."""

    handle: XComArg
    group: TaskGroup


@contextmanager
def claimed_batch(
    name: str = "batch",
    *,
    feed: FeedLike | XComArg,
    postgres_conn_id: str | None = None,
    source_conn_id: str | None = None,
    staged: bool | None = None,
    write: Write | None = None,
    outlets: Sequence[Any] = (),
    **claim: Any,
) -> Iterator[ClaimedBatch]:
    """Process a detached batch with the tasks of the block, which can be of any operators.

    They form a group. Its task ``claim`` claims a batch before them, and skips them if nothing is ready. ``ack`` acks
    the batch when all of them have succeeded. ``release`` ends the lease if a task has failed. It is a teardown, so the
    DAG run still fails, and tasks after the group follow ``ack``. If a failed task is cleared, it works on the same
    attempt. If another run has claimed the batch meanwhile, it fails with StaleClaim; then clear ``claim``, too.

    :param name: the id of the group
    :param feed: the feed, or its JSON
    :param postgres_conn_id: the database that holds the results and the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same
    :param staged: as in AckBatchOperator
    :param write: as in AckBatchOperator
    :param outlets: the outlets of ``ack``
    :param claim: the further arguments of ClaimBatchOperator, such as ``lease`` and ``on_busy``
    """
    where: dict[str, Any] = {"feed": feed, "source_conn_id": source_conn_id}
    if postgres_conn_id is not None:
        where["postgres_conn_id"] = postgres_conn_id
    with TaskGroup(name) as group:
        claiming = ClaimBatchOperator(task_id="claim", **where, **claim)
        yield ClaimedBatch(claiming.output, group)
        for root in [*group.get_roots()]:
            if root is not claiming:
                claiming >> root
        leaves = [*group.get_leaves()]
        if leaves == [claiming]:
            raise InvalidArgument(
                f"{name}: the block has no task that processes the batch: add one inside it"
            )
        ack = AckBatchOperator(
            task_id="ack", **where, handle=claiming.output, staged=staged, write=write, outlets=list(outlets)
        )
        release = ReleaseBatchOperator(task_id="release", **where, handle=claiming.output).as_teardown()
        leaves >> ack
        [*leaves, ack] >> release
