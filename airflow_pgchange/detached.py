"""Detached batches: a batch is claimed with a lease, processed anywhere for any length of time, and acked by its handle.

Meanwhile no connection is open, no transaction, and no lock. A handle names the attempt on a batch. The attempt is the
fencing token: when the lease has ended, the next claim returns the same batch with the next attempt, and from then on
the earlier attempt can no longer be acked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import psycopg

from airflow_pgchange.errors import InvalidArgument, StaleClaim
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import BATCH_LIMIT, Seconds, seconds
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.feed import Feed, from_json, to_json
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.transaction import ConsumerTransaction

__all__ = ["Handle", "ack", "claim", "release", "renew"]


@dataclass(frozen=True)
class Handle:
    """An attempt on a batch. Its text is short, has no secrets, and is all that another process needs to read the batch.

    ``count`` is the number of changes.
    """

    feed: Feed
    batch_id: str
    attempt: int
    count: int

    @classmethod
    def of(cls, feed: Feed, batch: Batch) -> Self:
        return cls(feed, batch.id, batch.attempt, batch.count)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the handle that ``str`` wrote. Raises InvalidArgument for any other text."""
        try:
            given = json.loads(text)
            return cls(cast(Feed, from_json(given["feed"])), given["batch"], given["attempt"], given["count"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(
                f"{text!r} is not the handle of a batch: give the text that the claim returned"
            ) from error

    def __str__(self) -> str:
        return json.dumps(
            {"feed": to_json(self.feed), "batch": self.batch_id, "attempt": self.attempt, "count": self.count}
        )

    @property
    def token(self) -> Mapping[str, Any]:
        return {"id": self.batch_id, "attempt": self.attempt}


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
        batch = transaction.claim(limit, max_attempts, split=split, lease=seconds("lease", lease))
        return None if batch is None else Handle.of(feed, batch)


def renew(handle: Handle, source: str, *, lease: Seconds) -> None:
    """Let the lease end this much later than now. Raises StaleClaim if another attempt has begun, or the batch has
    ended."""
    with connect(source, primary=True) as connection:
        ask(connection, handle.feed.renew(handle.token, seconds("lease", lease)))


def ack(
    handle: Handle,
    results: str,
    source: str | None = None,
    write: Callable[[psycopg.Connection[Any]], object] | None = None,
    *,
    busy_timeout: Seconds | None = 60,
) -> None:
    """Call ``write`` with the connection of the results, and record the batch as processed, in one transaction.

    The guarantee is that of ``ConsumerTransaction``. Raises StaleClaim if another attempt has begun, or if the batch has
    ended, as after an ack whose answer was lost.
    """
    with ConsumerTransaction(handle.feed, results, source, busy_timeout=busy_timeout) as transaction:
        transaction.resume(handle.token)
        transaction.ack(write)


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
    caused the error.
    """
    try:
        with ConsumerTransaction(handle.feed, results, source, busy_timeout=60) as transaction:
            transaction.resume(handle.token)
            transaction.release(error, of_batch)
    except StaleClaim:
        return False
    return True
