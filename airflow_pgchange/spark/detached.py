"""The work of an application on a detached batch. The text of a handle names the batch, and the application runs
anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_pgchange.detached import Handle, batch_of, renewed
from airflow_pgchange.errors import InvalidArgument, StaleClaim
from airflow_pgchange.feeds import error_text
from airflow_pgchange.spark import poison_batch
from airflow_pgchange.spark.request import Work

RESULTS, SOURCE = "PGCHANGE_RESULTS", "PGCHANGE_SOURCE"
"""The environment variables with the connection strings of the results and of the changes."""
HANDLE = "PGCHANGE_HANDLE"
"""The environment variable with the text of the handle, for an application that SparkBatchOperator started."""


def work_of(handle: Handle, results: str | None, source: str | None) -> Work:
    """Return the batch with its databases. Raises StaleClaim if another attempt has begun, or the batch has ended, and
    InvalidArgument if no connection string is known."""
    results = results or os.environ.get(RESULTS)
    if not results:
        raise InvalidArgument(
            f"the database of the results is not known: set {RESULTS} to its connection string, or give it as "
            "batch_job(handle, results=...)"
        )
    source = source or os.environ.get(SOURCE) or results
    return Work(handle.feed, batch_of(handle, results, source), results, source)


@contextmanager
def leased(handle: Handle, work: Work) -> Iterator[None]:
    """Renew the lease while the block runs. An error of the block is stored with the attempt, for its dead letter."""
    try:
        with renewed(handle, work.source):
            yield
    except StaleClaim:
        raise
    except Exception as error:
        error_text.note(
            work.feed,
            work.source,
            work.batch,
            error_text.described(error, (work.results, work.source)),
            hide=lambda text: text,
            of_batch=poison_batch.is_of_the_content(error),
        )
        raise
