"""Control pods of tubes: scheduled backfills, and what a downstream gives up behind one or behind a truncate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import BatchNotFinished, ConsumerBusy, PgChangeError, Refused, Stopped
from airflow_pgchange.feeds.checks import Seconds, seconds
from airflow_pgchange.feeds.connections import connect, keep_open
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.keys import BIGINT, Key
from airflow_pgchange.feeds.queries import ask, call, records, select
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached import Attached
from airflow_pgchange.tubes.backfills import BackfillProgress, backfill_chunks, committed
from airflow_pgchange.tubes.given_ids import each_id

CHUNK = 10_000
"""Ids that are touched in one go."""
BACKFILL_SECONDS = 60.0
"""For how long scheduled backfills are carried out in one go, before the worker's other duties have their turn."""

LEAST_WAIT = 1.0
"""Seconds for which each of them may wait for who writes its table, also when that time is over."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Control:
    """A control pod whose turn has come: all that was touched in its shard before it is done.

    ``backfill_end``: of ``table`` the downstream gives up what it has not written since ``start_seq``; without a table it
    is asked for each table in its shard. ``truncate``: all that it had of ``table`` before ``seq``; of several whose turn
    has come it is asked for the last. Any other ``type`` is a user's own, and means what its ``payload`` says.
    """

    seq: int
    shard: int
    type: str
    table: str
    start_seq: int | None = None
    payload: Mapping[str, Any] = field(default_factory=dict, compare=False)


Downstream = Callable[[Control], Iterable[Key] | None]
"""Which ids a downstream holds and may have to give up. One too many does no harm: each is read anew.

It gets users' own control pods too, and does itself what they ask for. It raises Refused where that can never be done:
then the pod is taken away, and noted in ``tube.fault``. After any other error the pod stays, and its turn comes again.
"""


@dataclass(frozen=True)
class WorkedOff:
    """A control pod that is gone: how many ids it touched, or why it was given up."""

    control: Control
    touched: int = 0
    given_up: str | None = None


def work_off(
    feed: TubeFeed,
    source: str,
    downstream: Downstream,
    *,
    busy_timeout: Seconds | None = 0,
    backfill_timeout: Seconds = BACKFILL_SECONDS,
    on_progress: Callable[[BackfillProgress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[WorkedOff]:
    """Work off the control pods of a worker whose turn has come.

    First the backfills that were scheduled, in all for about ``backfill_timeout``, after which no further one is begun:
    ``on_progress`` is called after each of their chunks. One that is not at its end by then, or that a person has paused,
    goes on the next time. Then what the downstream has to give up is touched, so that it takes the path of a deletion:
    read anew, and deleted if it is gone. Exactly once: these touches and the end of the pods are one transaction, which
    holds the worker's lock.

    No control pod holds up another. One that can never be worked off is taken away, with a line in the log and a row in
    ``tube.fault``; where one fails for now, the first such error is raised when all others are done: InvalidArgument
    where the downstream gave something that is no id. Raises ConsumerBusy while the worker is at work for longer than
    ``busy_timeout``, and Stopped.
    """
    turn = _Turn(feed, downstream, seconds("backfill_timeout", backfill_timeout), on_progress, stopped)
    turn.carry_out_backfills(source)
    done = []
    with ConsumerTransaction(feed, source, busy_timeout=busy_timeout, stopped=stopped) as consumer:
        if consumer.busy:
            raise ConsumerBusy(f"{feed.name} is at work in another transaction")
        due = _due(consumer.connection, feed)
        turn.covered = _covered(due)
        for row in due:
            try:
                one = turn.work_off(consumer.connection, row)
            except Stopped:
                raise
            except (Exception, SystemExit) as error:
                if consumer.connection.closed:
                    raise
                log.exception("%s: control pod %s failed, and stays", feed.name, row["seq"])
                turn.failed = turn.failed or error
                continue
            if one is not None:
                done.append(one)
        with translated():
            ask(
                consumer.connection,
                select("tube.note_controls", feed.tube, feed.worker, turn.failed is not None),
            )
    if turn.failed is not None:
        raise turn.failed
    return done


@dataclass
class _Turn:
    """One go at the control pods of a worker.

    By their seq: rows that the scheduled backfills looked at which are at their end, why others can have none, and the
    truncations for which a later one asks. ``failed``: the first error.
    """

    feed: TubeFeed
    downstream: Downstream
    seconds: float
    on_progress: Callable[[BackfillProgress], None]
    stopped: Callable[[], bool]
    ended: dict[int, int] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)
    failed: BaseException | None = None

    def carry_out_backfills(self, source: str) -> None:
        deadline = time.monotonic() + self.seconds
        # One in any case, or in a short time none would come to its end. One that only waited for writers does not count.
        worked = False
        with translated(), connect(source, primary=True) as connection:
            keep_open(connection)
            for row in _due(connection, self.feed):
                if row["type"] != "backfill_schedule":
                    continue
                if worked and time.monotonic() >= deadline:
                    break
                try:
                    worked |= self._backfill(connection, row["seq"], deadline)
                except Stopped:
                    raise
                except Refused as error:
                    self.refused[row["seq"]] = error
                except (PgChangeError, psycopg.Error) as error:
                    if connection.closed:
                        raise
                    self.failed = self.failed or error

    def _backfill(self, connection: psycopg.Connection[Any], seq: int, deadline: float) -> bool:
        """Whether it came any further."""
        try:
            number = committed(connection, self._about("tube.backfill_scheduled", seq))
        except BatchNotFinished:
            # Another process has come to its end since we saw it.
            return False
        if number is None:
            self.ended[seq] = 0
            return False
        patience = max(LEAST_WAIT, deadline - time.monotonic())
        for progress in backfill_chunks(connection, number, timeout=patience, stopped=self.stopped):
            self.on_progress(progress)
            if progress.finished:
                self.ended[seq] = progress.looked_at
            if progress.state == "cancelled":
                raise Refused(f"backfill {number} was cancelled")
            if progress.state == "paused":
                return False
            if progress.finished or time.monotonic() >= deadline:
                break
        return True

    def work_off(self, connection: psycopg.Connection[Any], row: Mapping[str, Any]) -> WorkedOff | None:
        """A control pod in a savepoint of its own; None where it stays for another time."""
        seq = row["seq"]
        try:
            with translated(), connection.transaction():
                return self._done(connection, row)
        except Refused as error:
            reason = str(error)
        with translated(), connection.transaction():
            ask(connection, self._about("tube.give_up", seq, reason))
        log.warning(
            "%s: control pod %s was given up: %s; it was %s", self.feed.name, seq, reason, row["payload"]
        )
        return WorkedOff(Control(seq, row["shard"], row["type"] or "", row["tbl"] or ""), 0, reason)

    def _done(self, connection: psycopg.Connection[Any], row: Mapping[str, Any]) -> WorkedOff | None:
        control, seq = _control(row), row["seq"]
        if seq in self.refused:
            raise self.refused[seq]
        if control.type == "backfill_schedule" and seq not in self.ended:
            return None
        touched = self.ended.get(seq, 0)
        asks_nothing = control.type in ("backfill_schedule", "backfill_start") or seq in self.covered
        if not asks_nothing:
            touched += self._collect(connection, self._questions(connection, control))
        ask(connection, self._about("tube.control_done", seq))
        return WorkedOff(control, touched)

    def _questions(self, connection: psycopg.Connection[Any], control: Control) -> list[Control]:
        """What the downstream is asked. The end of a backfill without a table, as older tubes wrote it, is of each table
        in its shard; raises Refused if there is none."""
        if control.type != "backfill_end" or control.table:
            return [control]
        attached = Attached.all(self.feed.tube, ask(connection, self.feed.attached()))
        tables = [each.table for each in attached if each.shard == control.shard]
        if not tables:
            raise Refused(f"it names no table, and none is attached under shard {control.shard}")
        return [replace(control, table=table) for table in tables]

    def _collect(self, connection: psycopg.Connection[Any], questions: list[Control]) -> int:
        """Touch what the downstream gives; returns how many ids. A question that it refuses holds up no other; raises
        Refused if it refuses all."""
        touched, refusals = 0, list[Refused]()
        types = tuple(ask(connection, self.feed.key_types()))
        collect = "tube.collect" if types == BIGINT else "tube.collect_keys"
        for question in questions:
            try:
                given: Any = self.downstream(question) or ()
                # An error that is kept would keep the source that it left, and its connections.
                with closing(given) if hasattr(given, "close") else nullcontext():
                    held = each_id(given, types)
                    while ids := list(islice(held, CHUNK)):
                        if self.stopped():
                            raise Stopped(f"{self.feed.name}: stopped, and nothing was given up")
                        touched += ask(connection, self._about(collect, question.seq, ids))
            except Refused as error:
                refusals.append(error)
                log.warning("%s: control pod %s: %s", self.feed.name, question.seq, error)
        if len(refusals) == len(questions):
            raise refusals[0]
        return touched

    def _about(self, function: str, seq: int, *arguments: Any) -> sql.Composed:
        return select(function, self.feed.tube, self.feed.workers, self.feed.worker, seq, *arguments)


def _due(connection: psycopg.Connection[Any], feed: TubeFeed) -> list[dict[str, Any]]:
    query = sql.SQL("select * from {}").format(
        call("tube.control_pods", feed.tube, feed.workers, feed.worker)
    )
    return records(connection, query)


def _covered(due: list[dict[str, Any]]) -> set[int]:
    """The truncations before another of the same table and shard, which gives up all that they do.

    One question for each of them would touch everything that is to be given up as often as the table was truncated.
    """
    truncations = {
        row["seq"]: (row["op"], row["shard"], row["tbl"]) for row in due if row["type"] == "truncate"
    }
    last = {subject: seq for seq, subject in truncations.items()}
    return truncations.keys() - last.values()


def _control(row: Mapping[str, Any]) -> Control:
    """What a control pod says; raises Refused where that means nothing."""
    payload = row["payload"]
    if not isinstance(payload, dict) or not isinstance(payload.get("type"), str) or not payload["type"]:
        raise Refused("its payload is no object with a type")
    kind, table, start = payload["type"], payload.get("tbl"), str(payload.get("start_seq", ""))
    is_of_shard = kind == "backfill_end" and table is None
    if (
        kind in ("backfill_schedule", "backfill_end", "truncate")
        and not isinstance(table, str)
        and not is_of_shard
    ):
        raise Refused("it names no table")
    if kind == "backfill_end" and not start.isdecimal():
        raise Refused(f"start_seq is {start!r}, and is to be the number of a pod")
    return Control(
        seq=row["seq"],
        shard=row["shard"],
        type=kind,
        table=row["tbl"] or "",
        start_seq=int(start) if start.isdecimal() else None,
        payload=payload,
    )
