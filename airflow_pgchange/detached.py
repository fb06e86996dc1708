"""Detached batches: they are claimed with a lease, processed anywhere for any length of time, and acked by their
handle.

Meanwhile there is no open connection, transaction or lock. A handle names the attempt on a batch. The attempt is the
fencing token: after the end of the lease, the next claim returns the same batch with the next attempt. From then on the
earlier attempt can no longer be acked.
"""

from __future__ import annotations

import json
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import psycopg

from airflow_pgchange.errors import InvalidArgument, PgChangeError, StaleClaim
from airflow_pgchange.feeds.argument_checks import BATCH_LIMIT, Seconds, seconds
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.feed import Feed, progress_at
from airflow_pgchange.feeds.feed_kinds import from_json, to_json
from airflow_pgchange.feeds.periodic_thread import repeated
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.results.manifests import merge_kept

__all__ = ["Handle", "ack", "batch_of", "claim", "release", "renew", "renewed"]

PATIENCE = 60.0
"""Seconds to wait for the consumer's lock, which other transactions hold for a moment at each claim and ack."""
RENEWALS = 3
"""The number of renewals within the length of a lease, so that it survives a failed renewal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handle:
    """An attempt on a batch. Its text is short, has no secrets, and is enough for another process to read the batch.

    ``version`` distinguishes the batch from earlier batches of the consumer. A dead letter that is sent again keeps its
    id and starts with attempt 1. ``count`` is the number of changes, and ``lease`` is the length of the lease.
    """

    feed: Feed
    batch_id: str
    version: int
    attempt: int
    count: int
    lease: Seconds = field(compare=False)

    @classmethod
    def of(cls, feed: Feed, batch: Batch, lease: Seconds) -> Self:
        return cls(feed, batch.id, batch.version, batch.attempt, batch.count, lease)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the handle that ``str`` wrote. Raises InvalidArgument for any other text."""
        try:
            fields = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            parts = [fields[part] for part in ("batch", "version", "attempt", "count", "lease")]
            return cls(cast(Feed, from_json(fields["feed"])), *parts)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(
                f"{text!r} is not the handle of a batch: give the text that the claim returned"
            ) from error

    def __str__(self) -> str:
        fields = {
            "feed": to_json(self.feed),
            "batch": self.batch_id,
            "version": self.version,
            "attempt": self.attempt,
            "count": self.count,
            "lease": seconds("lease", self.lease),
        }
        # Letters and digits pass through shells, templates and the arguments of any job unchanged.
        return urlsafe_b64encode(json.dumps(fields, separators=(",", ":")).encode()).decode().rstrip("=")

    @property
    def token(self) -> Mapping[str, Any]:
        return {"id": self.batch_id, "version": self.version, "attempt": self.attempt}


def claim(
    feed: Feed,
    results: str,
    source: str | None = None,
    *,
    lease: Seconds,
    owner: str,
    limit: int = BATCH_LIMIT,
    max_attempts: int | None = None,
    split: bool = False,
    busy_timeout: Seconds | None = 0,
) -> Handle | None:
    """Claim the next batch with a lease, commit, and return its handle; None if nothing is ready.

    ``owner`` says for people who processes the batch. Raises Leased while another attempt has a lease, ConsumerBusy if
    the consumer's lock is held, and the errors of ``ConsumerTransaction.claim``.
    """
    with ConsumerTransaction(feed, results, source, busy_timeout=busy_timeout, run=owner) as transaction:
        batch = transaction.claim(limit, max_attempts, split=split, lease=lease)
        return None if batch is None else Handle.of(feed, batch, lease)


def batch_of(handle: Handle, results: str, source: str | None = None) -> Batch:
    """Return the batch, for ``airflow_pgchange.feeds.reading``. Raises StaleClaim if another attempt has begun, or the
    batch has ended."""
    with ConsumerTransaction(handle.feed, results, source, busy_timeout=PATIENCE) as transaction:
        batch = transaction.resume(handle.token)
        transaction.keep_lease()
        return batch


def renew(handle: Handle, source: str, *, lease: Seconds | None = None) -> None:
    """Let the lease end this much later than now; None: by the length that it was claimed with. Raises StaleClaim if
    another attempt has begun, or the batch has ended."""
    with connect(source, primary=True) as connection:
        ask(connection, handle.feed.renew(handle.token, handle.lease if lease is None else lease))


@contextmanager
def renewed(handle: Handle, source: str) -> Iterator[None]:
    """Renew the lease before the block, while it runs, from another thread, and after it, so that the ack has time.

    Raises StaleClaim before or after the block if another attempt has begun, or the batch has ended. If the database
    cannot be reached, the lease is renewed later: the attempt continues unless another has begun.
    """
    renew(handle, source)

    def try_to_renew() -> None:
        try:
            renew(handle, source)
        except StaleClaim:
            raise
        except (PgChangeError, psycopg.Error) as error:
            log.warning("%s: could not renew the lease, will retry: %s", handle.feed.name, error)

    def keep() -> bool:
        try:
            try_to_renew()
        except StaleClaim:
            return False
        return True

    with repeated(keep, seconds("lease", handle.lease) / RENEWALS, "pgchange-lease"):
        yield
    try_to_renew()


def ack(
    handle: Handle,
    results: str,
    source: str | None = None,
    write: Callable[[psycopg.Connection[Any]], object] | None = None,
    *,
    staged: bool = False,
    busy_timeout: Seconds | None = PATIENCE,
) -> bool:
    """Call ``write`` with the connection of the results, and record the batch as processed, in one transaction.

    With ``staged``, first merge what an application has staged in ``batch_job(handle)``. The guarantee is that of
    ``ConsumerTransaction``. Returns False, and writes nothing, if this attempt was acked before, as after an ack whose
    answer was lost. Raises StaleClaim if another attempt has begun, or the batch has ended, and
    BatchNotFinished if no application has finished.
    """

    def write_all(batch: Batch, connection: psycopg.Connection[Any]) -> None:
        if staged:
            merge_kept(connection, batch)
        if write is not None:
            write(connection)

    return finish(handle, results, source, write_all, busy_timeout=busy_timeout) is not None


def finish(
    handle: Handle,
    results: str,
    source: str | None,
    write: Callable[[Batch, psycopg.Connection[Any]], object],
    *,
    busy_timeout: Seconds | None = PATIENCE,
    stopped: Callable[[], bool] = lambda: False,
) -> Batch | None:
    """Ack as ``ack`` does, and return the batch; None if it was acked before."""
    try:
        with ConsumerTransaction(
            handle.feed, results, source, busy_timeout=busy_timeout, stopped=stopped
        ) as transaction:
            batch = transaction.resume(handle.token)
            transaction.ack(lambda connection: write(batch, connection))
    except StaleClaim:
        if not _is_acked(handle, results, source):
            raise
        return None
    return replace(batch, seconds=transaction.progress.seconds)


def _is_acked(handle: Handle, results: str, source: str | None) -> bool:
    """Whether this attempt was acked, as far as the record of the last days says."""
    with connect(progress_at(handle.feed, results, source or results), primary=True) as connection:
        return bool(ask(connection, handle.feed.outcome(handle.token)) == "acked")


def release(
    handle: Handle,
    results: str,
    source: str | None = None,
    *,
    error: str | None = None,
    of_batch: bool | None = None,
) -> bool:
    """End the lease, so that the batch can be claimed again, and store the error of this attempt.

    False if another attempt has begun, or the batch has ended. ``of_batch``: whether the content of the batch may have
    caused the error. If that is None, an error that the attempt has stored itself is kept.
    """
    try:
        with ConsumerTransaction(handle.feed, results, source, busy_timeout=PATIENCE) as transaction:
            transaction.resume(handle.token)
            transaction.release(error, of_batch)
    except StaleClaim:
        return False
    return True
