"""Batch after batch of one feed, each in a consumer transaction of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import OnBusy, OnGiveUp, check_on_give_up, check_plan
from airflow_pgchange.feeds.errors import BatchGivenUp, ConsumerBusy, PgChangeError, Stopped
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.transaction import ConsumerTransaction

SHOWN_BATCHES = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What to drain and how far.

    ``limit``: changes a batch at most. ``max_batches``: batches at most, None: until nothing is ready.
    ``on_busy``: what to do while another transaction works on the feed: wait for it (``wait_for`` seconds,
    None: as long as it takes), skip, or fail. ``max_attempts``: from that many failed attempts on a batch is
    not tried again, None: it always is. ``on_give_up``: then fail, until a person has mended it or given it up, or make
    it a dead letter and go on. ``hide`` takes secrets out of what it failed on.
    """

    feed: Feed
    results: str = field(repr=False)
    source: str | None = field(default=None, repr=False)
    limit: int = 100_000
    max_batches: int | None = 1
    on_busy: OnBusy = "wait"
    wait_for: float | None = None
    max_attempts: int | None = None
    on_give_up: OnGiveUp = "fail"
    hide: Callable[[str], str] = lambda text: text

    def __post_init__(self) -> None:
        check_plan(
            self.on_busy, limit=self.limit, max_batches=self.max_batches, max_attempts=self.max_attempts
        )
        check_on_give_up(self.on_give_up, self.max_attempts)

    @property
    def reason(self) -> str:
        return f"tried as often as max_attempts={self.max_attempts} allows"


@dataclass(frozen=True)
class Drained:
    """What was processed and committed. ``busy``: somebody else was at work when it ended. ``letters``: the dead letters
    of the batches that were given up on the way."""

    batches: int = 0
    changes: int = 0
    batch_ids: tuple[str, ...] = ()
    seconds: float = 0.0
    busy: bool = False
    letters: tuple[int, ...] = ()

    def and_then(self, batch: Batch) -> Drained:
        return replace(
            self,
            batches=self.batches + 1,
            changes=self.changes + batch.count,
            batch_ids=(*self.batch_ids, batch.id),
        )

    def summary(self) -> dict[str, Any]:
        """Small, plain JSON: the latest ids only."""
        return {
            "batches": self.batches,
            "changes": self.changes,
            "batch_ids": list(self.batch_ids[-SHOWN_BATCHES:]),
            "seconds": round(self.seconds, 3),
            "busy": self.busy,
            "letters": list(self.letters[-SHOWN_BATCHES:]),
        }


@dataclass(frozen=True)
class _Step:
    """What became of one transaction: a batch that was ``tried``, and the ``letter`` of one that was given up."""

    tried: Batch | None = None
    letter: int | None = None
    busy: bool = False


def drain(
    plan: Plan,
    process: Callable[[ConsumerTransaction, Batch], None],
    committed: Callable[[Batch, float], None] = lambda batch, seconds: None,
    stopped: Callable[[], bool] = lambda: False,
    given_up: Callable[[int], None] = lambda letter: None,
) -> Drained:
    """Claim, ``process`` (which must ack), commit, again and again as the plan says.

    ``committed`` is told of each batch and its seconds, ``given_up`` of each dead letter. Raises ConsumerBusy
    (``on_busy="fail"``), BatchGivenUp (``on_give_up="fail"``), Stopped, and whatever ``process`` raises: then that batch
    is rolled back, and those before it stay. Where a batch becomes a dead letter, its last error is logged instead.
    """
    began = time.monotonic()
    done, tried = Drained(), 0
    while plan.max_batches is None or tried < plan.max_batches:
        started = time.monotonic()
        step = _step(plan, process, stopped)
        done = replace(done, busy=step.busy)
        if step.letter is not None:
            done = replace(done, letters=(*done.letters, step.letter))
            given_up(step.letter)
        elif step.tried is not None:
            committed(step.tried, time.monotonic() - started)
            done = done.and_then(step.tried)
        else:
            break
        tried += step.tried is not None
    return replace(done, seconds=time.monotonic() - began)


def _step(
    plan: Plan, process: Callable[[ConsumerTransaction, Batch], None], stopped: Callable[[], bool]
) -> _Step:
    batch = None
    try:
        with _opened(plan, stopped) as transaction:
            if transaction.busy:
                if plan.on_busy == "skip":
                    return _Step(busy=True)
                raise ConsumerBusy(
                    f"{plan.feed.name} is at work in another transaction: wait for it, or say on_busy='skip'"
                )
            try:
                batch = transaction.claim(plan.limit, plan.max_attempts)
            except BatchGivenUp:
                if plan.on_give_up == "fail":
                    raise
                return _Step(letter=transaction.give_up(plan.reason))
            if batch is not None:
                process(transaction, batch)
    except Stopped:
        raise
    except Exception:
        letter = None if batch is None else _given_up(plan, batch, stopped)
        if letter is None:
            raise
        return _Step(tried=batch, letter=letter)
    return _Step(tried=batch)


def _opened(plan: Plan, stopped: Callable[[], bool]) -> ConsumerTransaction:
    wait = plan.wait_for if plan.on_busy == "wait" else 0
    return ConsumerTransaction(
        plan.feed, plan.results, plan.source, wait=wait, stopped=stopped, hide=plan.hide
    )


def _given_up(plan: Plan, batch: Batch, stopped: Callable[[], bool]) -> int | None:
    """The letter of a batch whose last attempt has failed; None where it is tried again, where somebody else has finished
    it, or where it could not be given up now: then the next claim does it."""
    if plan.on_give_up == "fail" or plan.max_attempts is None or batch.attempt < plan.max_attempts:
        return None
    log.exception("%s: the last attempt on batch %s failed", plan.feed.name, batch.id)
    try:
        with _opened(plan, stopped) as transaction:
            return None if transaction.busy else transaction.give_up(plan.reason, batch.id)
    except (PgChangeError, psycopg.Error) as error:
        log.warning("%s: batch %s was not given up now: %s", plan.feed.name, batch.id, error)
        return None
