"""The entry of Spark applications: ``with batch_job() as job``, or ``for job in batch_jobs()``.

An application that processes a detached batch gives its handle: ``with batch_job(handle) as job``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_pgchange.detached import Handle
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.results import manifests
from airflow_pgchange.results.merge import write_manifest
from airflow_pgchange.spark import poison_batch, request, session
from airflow_pgchange.spark.detached import HANDLE, leased, work_of
from airflow_pgchange.spark.installed_versions import check_versions
from airflow_pgchange.spark.job import Job
from airflow_pgchange.spark.parent_process import follow_parent
from airflow_pgchange.spark.progress_notes import Notes
from airflow_pgchange.spark.request import Request


@contextmanager
def batch_job(
    handle: Handle | str | None = None, *, results: str | None = None, source: str | None = None
) -> Iterator[Job]:
    """Work on the batch that the operator handed to this application, in a Spark session.

    Merges of the block count only if the block ends without an error and the operator's transaction commits. This
    process ends when the operator does. Raises InvalidArgument if no batch was handed over. Raises VersionsDiffer if
    Spark's parts have different versions here, or if the Spark Connect server has another version.

    With ``handle``, or its text, the batch is detached, and the application runs anywhere. SparkBatchOperator with
    ``detached`` gives the handle in the environment variable ``PGCHANGE_HANDLE``. The lease is renewed while the block
    runs. The block does not ack the batch: its merges count once the task ``ack`` of ``claimed_batch``, or
    ``detached.ack(..., staged=True)``, has merged them. ``results`` and ``source`` are the connection strings of the
    results and of the changes. By default they are in the environment variables ``PGCHANGE_RESULTS`` and
    ``PGCHANGE_SOURCE``. If there is none for the changes, they are in the database of the results. Raises StaleClaim if
    another attempt has begun, or the batch has ended.
    """
    handle = handle or os.environ.get(HANDLE)
    if handle is None:
        working = _worked(_first())
    else:
        parsed = Handle.from_text(handle) if isinstance(handle, str) else handle
        working = _detached(parsed, results, source)
    with working as job:
        yield job


def batch_jobs() -> Iterator[Job]:
    """Yield a job for each of the operator's batches, one after another: ``for job in batch_jobs():``.

    All batches share one process and one Spark session. The body processes a batch as a ``batch_job()`` block does.
    When the body has ended, the operator commits and claims the next batch, as long as its ``max_batches`` and
    ``until`` allow. A body that is left by ``break`` has not processed its batch. Cached frames and settings of the
    session stay for the next batch. Raises the errors of ``batch_job``.
    """
    if HANDLE in os.environ:
        with batch_job() as job:
            yield job
        return
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
def _detached(handle: Handle, results: str | None, source: str | None) -> Iterator[Job]:
    check_versions()
    work = work_of(handle, results, source)
    with leased(handle, work):
        job = Job(session.opened(), work)
        yield job
        job.ended = True
        with connect(work.results, primary=True) as connection:
            manifests.keep(connection, work.batch, job.staged)


@contextmanager
def _worked(taken: Request) -> Iterator[Job]:
    spark, notes = session.opened(), Notes(taken.manifest)
    poison_batch.note_errors(taken.manifest)
    notes.add("reading", f"{taken.batch.count:,} changes")
    job = Job(spark, taken, notes.add)
    with session.followed(spark, notes.add):
        yield job
    job.ended = True
    write_manifest(taken.manifest, job.staged)
