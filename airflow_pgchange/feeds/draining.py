"""Batch after batch of one feed, each in a consumer transaction of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.errors import ConsumerBusy, InvalidArgument
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.transaction import ConsumerTransaction

OnBusy = Literal["wait", "skip", "fail"]
SHOWN_BATCHES = 20


@dataclass(frozen=True)
class Plan:
    """What to drain and how far.

    ``limit``: changes a batch at most. ``max_batches``: batches at most, None: until nothing is ready.
    ``on_busy``: what to do while another transaction works on the feed: wait for it (``wait_for`` seconds,
    None: as long as it takes), skip, or fail. ``max_attempts``: from that many failed attempts on a batch is
    not tried again, None: it always is.
    """

    feed: Feed
    results: str = field(repr=False)
    source: str | None = field(default=None, repr=False)
    limit: int = 100_000
    max_batches: int | None = 1
    on_busy: OnBusy = "wait"
    wait_for: float | None = None
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        check(self.on_busy, limit=self.limit, max_batches=self.max_batches, max_attempts=self.max_attempts)


def check_count(name: str, value: int) -> None:
    """Raise InvalidArgument for what is no number from 1 to the largest that PostgreSQL calls an integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidArgument(f"{name} must be a number from 1 to {2**31 - 1}, not {value!r}")


def check(on_busy: str, **at_least_one: int | None) -> None:
    """Raise InvalidArgument for what no plan can say."""
    if on_busy not in get_args(OnBusy):
        raise InvalidArgument(f"on_busy must be one of {', '.join(get_args(OnBusy))}, not {on_busy!r}")
    for name, value in at_least_one.items():
        if value is not None:
            check_count(name, value)


@dataclass(frozen=True)
class Drained:
    """What was processed and committed. ``busy``: somebody else was at work when it ended."""

    batches: int = 0
    changes: int = 0
    batch_ids: tuple[str, ...] = ()
    seconds: float = 0.0
    busy: bool = False

    def and_then(self, batch: Batch) -> Drained:
        return Drained(
            self.batches + 1, self.changes + batch.count, (*self.batch_ids, batch.id), self.seconds, self.busy
        )

    def summary(self) -> dict[str, Any]:
        """Small, plain JSON: the latest ids only."""
        return {
            "batches": self.batches,
            "changes": self.changes,
            "batch_ids": list(self.batch_ids[-SHOWN_BATCHES:]),
            "seconds": round(self.seconds, 3),
            "busy": self.busy,
        }


def drain(
    plan: Plan,
    process: Callable[[ConsumerTransaction, Batch], None],
    committed: Callable[[Batch, float], None] = lambda batch, seconds: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Drained:
    """Claim, ``process`` (which must ack), commit, again and again as the plan says.

    ``committed`` is told of each batch and its seconds. Raises ConsumerBusy (``on_busy="fail"``), BatchGivenUp,
    Stopped, and whatever ``process`` raises: then that batch is rolled back, and those before it stay.
    """
    began = time.monotonic()
    done = Drained()
    while plan.max_batches is None or done.batches < plan.max_batches:
        started = time.monotonic()
        wait = plan.wait_for if plan.on_busy == "wait" else 0
        with ConsumerTransaction(
            plan.feed, plan.results, plan.source, wait=wait, stopped=stopped
        ) as transaction:
            if transaction.busy:
                if plan.on_busy == "skip":
                    done = Drained(done.batches, done.changes, done.batch_ids, busy=True)
                    break
                raise ConsumerBusy(
                    f"{plan.feed.name} is at work in another transaction: wait for it, or say on_busy='skip'"
                )
            batch = transaction.claim(plan.limit, plan.max_attempts)
            if batch is None:
                break
            process(transaction, batch)
        committed(batch, time.monotonic() - started)
        done = done.and_then(batch)
    return Drained(done.batches, done.changes, done.batch_ids, time.monotonic() - began, done.busy)
