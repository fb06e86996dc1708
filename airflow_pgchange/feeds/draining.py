"""Process one batch of a feed after another, each in a transaction of its own, and split or give up batches that fail
too often."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psycopg

from airflow_pgchange.errors import (
    BatchGivenUp,
    ConsumerBusy,
    Leased,
    PgChangeError,
    PoisonousChange,
    Stopped,
)
from airflow_pgchange.feeds.argument_checks import (
    BATCH_LIMIT,
    OnBusy,
    OnGiveUp,
    Seconds,
    Until,
    check_count,
    check_give_up,
    check_word,
    patience,
)
from airflow_pgchange.feeds.argument_checks import until as checked_until
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.sessions import Sessions
from airflow_pgchange.feeds.transaction import ConsumerTransaction

SHOWN_BATCHES = 20
LOOK_EVERY = 0.5
"""Seconds until the next attempt to claim a batch, if nothing was ready."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The feed to drain, its databases, and when to stop.

    - ``limit``: the maximum of changes in a batch.
    - ``max_batches``: the maximum of batches; None: no maximum.
    - ``until``: ``empty``: until nothing is ready. Or a length of time, for which batches are waited for; a batch that
      has begun is finished.
    - ``idle_timeout``: end when nothing was ready for this long; None: with ``empty`` at once, otherwise never.
    - ``on_busy``: if another transaction works on the feed: wait for it (``busy_timeout``; None: as long as it takes),
      skip, or fail.
    - ``max_attempts``: the number of failures after which a batch is not tried again; None: always try again.
    - ``on_give_up``: then, ``bisect``: split a batch that fails by its own content, until the bad change is alone and
      becomes a dead letter. ``fail``, until a person has corrected the cause or given up the batch. ``dead_letter``: make
      the whole batch a dead letter and continue.
    - ``hide``: removes further secrets from the text of an error.
    - ``run``: the name of the run, for people.
    - ``lease``: claim with a lease of this length for ``owner``, as ``ConsumerTransaction.claim`` does. The run ends
      with the first batch, and ``process`` need not ack it.
    - ``register``: whether a new consumer is registered.
    """

    feed: Feed
    results: str = field(repr=False)
    source: str | None = field(default=None, repr=False)
    limit: int = BATCH_LIMIT
    max_batches: int | None = 1
    until: Until = "empty"
    idle_timeout: Seconds | None = None
    on_busy: OnBusy = "wait"
    busy_timeout: Seconds | None = None
    max_attempts: int | None = None
    on_give_up: OnGiveUp = "bisect"
    hide: Callable[[str], str] = lambda text: text
    run: str | None = None
    register: bool = True
    lease: Seconds | None = None
    owner: str | None = None

    def __post_init__(self) -> None:
        check_count("limit", self.limit)
        for name in ("max_batches", "max_attempts"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        checked_until("until", self.until)
        check_word("on_busy", self.on_busy, OnBusy)
        check_word("on_give_up", self.on_give_up, OnGiveUp)
        check_give_up(self.on_give_up, self.max_attempts)
        patience("busy_timeout", self.busy_timeout)
        patience("idle_timeout", self.idle_timeout)

    @property
    def splits(self) -> bool:
        """Whether a batch that fails by its own content is split."""
        return self.on_give_up == "bisect" and self.max_attempts is not None

    @property
    def reason(self) -> str:
        return f"tried as often as max_attempts={self.max_attempts} allows"


@dataclass(frozen=True)
class Drained:
    """The batches that were processed and committed. ``busy``: it ended because another transaction worked on the feed.
    ``letters``: the dead letters of batches that were given up. ``splits``: the ids of the batches that were split, or of
    which parts were processed, and ``extra_attempts``: the number of attempts on their parts."""

    batches: int = 0
    changes: int = 0
    batch_ids: tuple[str, ...] = ()
    seconds: float = 0.0
    busy: bool = False
    letters: tuple[int, ...] = ()
    splits: tuple[str, ...] = ()
    extra_attempts: int = 0

    def and_tried(self, batch: Batch) -> Drained:
        if not batch.is_part:
            return self
        whole = batch.parts_of[:1]
        return replace(
            self,
            splits=self.splits if self.splits[-1:] == whole else (*self.splits, *whole),
            extra_attempts=self.extra_attempts + 1,
        )

    def and_then(self, batch: Batch) -> Drained:
        return replace(
            self,
            batches=self.batches + 1,
            changes=self.changes + batch.count,
            batch_ids=(*self.batch_ids, batch.id),
        )

    def summary(self) -> dict[str, Any]:
        """Return a small summary as JSON, with the last ids only."""
        return {
            "batches": self.batches,
            "changes": self.changes,
            "batch_ids": list(self.batch_ids[-SHOWN_BATCHES:]),
            "seconds": round(self.seconds, 3),
            "busy": self.busy,
            "letters": list(self.letters[-SHOWN_BATCHES:]),
            "splits": list(self.splits[-SHOWN_BATCHES:]),
            "extra_attempts": self.extra_attempts,
        }


@dataclass(frozen=True)
class _Step:
    """The outcome of one transaction: the batch that was ``tried``, and the dead ``letter`` if it was given up.

    ``failed``: the batch was rolled back, and the run goes on with it, or with its parts. ``leased``: the error of a
    claim that found a leased batch. It is not raised in the transaction, whose sessions would not be kept after an error.
    """

    tried: Batch | None = None
    letter: int | None = None
    busy: bool = False
    failed: bool = False
    leased: Leased | None = None


def drain(
    plan: Plan,
    process: Callable[[ConsumerTransaction, Batch], None],
    committed: Callable[[Batch, float], None] = lambda batch, seconds: None,
    stopped: Callable[[], bool] = lambda: False,
    given_up: Callable[[int], None] = lambda letter: None,
) -> Drained:
    """Claim a batch, call ``process``, which must ack it, and commit. Repeat this as the plan says.

    All batches use the same database sessions, which are reset between two batches. ``committed`` is called with each
    committed batch, which has the seconds of its phases, and with its total seconds. ``given_up`` is called with the
    number of each dead letter.

    Raises ConsumerBusy (``on_busy="fail"``), BatchGivenUp (``on_give_up="fail"``), Stopped, and the errors of
    ``process``. After an error the current batch is rolled back, and earlier batches stay committed. If a batch becomes a
    dead letter, its last error is logged and not raised.

    A batch that is split counts once for ``max_batches``, and its parts are finished in the same run. An error of a
    part is logged and not raised, unless its cause is outside the batch.
    """
    began = time.monotonic()
    ends, idle = _times(plan, began)
    done, tried, idle_since = Drained(), 0, math.inf
    failed: Batch | None = None
    with Sessions() as sessions:
        opened = partial(_opened, plan, stopped, sessions)
        while plan.max_batches is None or tried < plan.max_batches:
            started = time.monotonic()
            step = _unleased(plan, stopped, lambda: _step(plan, process, stopped, opened))
            done = replace(done, busy=step.busy)
            if step.tried is not None:
                done = done.and_tried(step.tried)
            if step.failed:
                failed = step.tried
                continue
            if step.letter is not None:
                done = replace(done, letters=(*done.letters, step.letter))
                given_up(step.letter)
                idle_since = math.inf
            elif step.tried is not None:
                committed(step.tried, time.monotonic() - started)
                done = done.and_then(step.tried)
                idle_since = math.inf
            elif step.busy:
                break
            else:
                now = time.monotonic()
                # Do not count from the last batch: this transaction may have waited for another one since then.
                idle_since = min(idle_since, now)
                if now >= idle_since + idle:
                    break
                time.sleep(min(LOOK_EVERY, max(0.0, min(ends, idle_since + idle) - now)))
                if stopped():
                    raise Stopped(f"{plan.feed.name}: stopped while waiting for a batch")
            # If the attempt before this step failed, this step has made its batch a dead letter, or has claimed a part.
            ended = step.tried or failed
            failed = None
            # All parts of a split batch belong to one run, so go on. A leased part is acked elsewhere before the next
            # part.
            if ended is not None and not ended.is_last_part and plan.lease is None:
                continue
            tried += ended is not None
            if time.monotonic() >= ends:
                break
    return replace(done, seconds=time.monotonic() - began)


def _times(plan: Plan, began: float) -> tuple[float, float]:
    """Return the time at which to end, and the seconds to wait while nothing is ready."""
    until, idle = checked_until("until", plan.until), patience("idle_timeout", plan.idle_timeout)
    if until == "empty":
        return math.inf, idle or 0.0
    return began + until, math.inf if idle is None else idle


def _unleased(plan: Plan, stopped: Callable[[], bool], step: Callable[[], _Step]) -> _Step:
    """Repeat a step that finds a leased batch until the lease ends, for as long as the plan waits for a busy consumer."""
    busy_timeout = patience("busy_timeout", plan.busy_timeout)
    ends = math.inf if busy_timeout is None else time.monotonic() + busy_timeout
    while True:
        result = step()
        if result.leased is None:
            return result
        if plan.on_busy == "skip":
            return _Step(busy=True)
        if plan.on_busy == "fail" or time.monotonic() >= ends:
            raise result.leased
        time.sleep(LOOK_EVERY)
        if stopped():
            raise Stopped(f"{plan.feed.name}: stopped while the batch was leased")


def _step(
    plan: Plan,
    process: Callable[[ConsumerTransaction, Batch], None],
    stopped: Callable[[], bool],
    opened: Callable[[], ConsumerTransaction],
) -> _Step:
    batch = None
    try:
        with opened() as transaction:
            if transaction.busy:
                if plan.on_busy == "skip":
                    return _Step(busy=True)
                raise ConsumerBusy(
                    f"{plan.feed.name} is at work in another transaction: wait for it, or say on_busy='skip'"
                )
            try:
                batch = transaction.claim(
                    plan.limit, plan.max_attempts, split=plan.splits, lease=plan.lease, owner=plan.owner
                )
            except Leased as error:
                return _Step(leased=error)
            except BatchGivenUp as error:
                if plan.on_give_up != "dead_letter" and not isinstance(error, PoisonousChange):
                    raise
                return _Step(letter=transaction.give_up(plan.reason))
            if batch is not None:
                process(transaction, batch)
    except Stopped:
        raise
    except Exception as error:
        if batch is not None and goes_on(plan, batch) and transaction.blames_batch(error) and not stopped():
            log.exception("%s: attempt %d on batch %s failed", plan.feed.name, batch.attempt, batch.id)
            return _Step(tried=batch, failed=True)
        letter = None if batch is None else _given_up(plan, batch, opened)
        if letter is None:
            raise
        return _Step(tried=batch, letter=letter)
    return _Step() if batch is None else _Step(tried=replace(batch, seconds=transaction.progress.seconds))


def _opened(plan: Plan, stopped: Callable[[], bool], sessions: Sessions) -> ConsumerTransaction:
    busy_timeout = plan.busy_timeout if plan.on_busy == "wait" else 0
    return ConsumerTransaction(
        plan.feed,
        plan.results,
        plan.source,
        busy_timeout=busy_timeout,
        stopped=stopped,
        hide=plan.hide,
        run=plan.run,
        register=plan.register,
        sessions=sessions,
    )


def goes_on(plan: Plan, batch: Batch) -> bool:
    """Whether a run continues after an error that the batch itself causes. It does if the next claim splits the batch,
    makes it a dead letter, or returns a part once more."""
    if not plan.splits or plan.max_attempts is None:
        return False
    return batch.is_part or batch.attempt >= plan.max_attempts


def _given_up(plan: Plan, batch: Batch, opened: Callable[[], ConsumerTransaction]) -> int | None:
    """Give up a batch whose last attempt has failed, and return its dead letter. None if the batch is tried again, if
    another worker has finished it, or if it could not be given up now. In the last case the next claim gives it up."""
    if plan.on_give_up != "dead_letter" or plan.max_attempts is None or batch.attempt < plan.max_attempts:
        return None
    log.exception("%s: the last attempt on batch %s failed", plan.feed.name, batch.id)
    try:
        with opened() as transaction:
            return None if transaction.busy else transaction.give_up(plan.reason, batch.id)
    except (PgChangeError, psycopg.Error) as error:
        log.warning(
            "%s: could not give up batch %s, the next claim will: %s", plan.feed.name, batch.id, error
        )
        return None
