"""Check that a consumer can ack only the version of the batch that it has claimed, for any feed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from airflow_pgchange.errors import StaleClaim
from airflow_pgchange.feeds import ConsumerTransaction
from airflow_pgchange.feeds.feed import Feed

BEYOND = {
    "the largest": lambda claimed: 2**63 - 1,
    "far ahead": lambda claimed: claimed + 2**40,
    "the one before": lambda claimed: claimed - 1,
    "nothing": lambda claimed: None,
}
OTHERS = {**BEYOND, "the next": lambda claimed: claimed + 1}


def only_the_claimed_version_is_acked(
    write: Callable[[], Any], feed: Feed, db: str, source: str | None = None
) -> None:
    """Check that a consumer can ack only the version of the batch that it has claimed.

    Write changes with ``write``, and claim them. Acks with another version must fail and must not move the consumer. If
    the claim and the results are in two databases, try only versions that no claim can have.
    """
    write()
    for name, version in (OTHERS if source is None else BEYOND).items():
        with pytest.raises(StaleClaim):
            _acked(feed, db, source, version)
            pytest.fail(f"{name} was acked")
    first = _acked(feed, db, source)
    write()
    assert _acked(feed, db, source) > first


def _acked(
    feed: Feed, db: str, source: str | None, version: Callable[[int], Any] = lambda claimed: claimed
) -> int:
    with ConsumerTransaction(feed, db, source) as consumer:
        batch = consumer.claim(1)
        assert batch is not None
        consumer.batch = replace(batch, version=version(batch.version))
        consumer.ack()
    return batch.version
