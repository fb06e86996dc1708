"""Process control pods of tubes: scheduled backfills, and the rows that a downstream deletes after a backfill or a
truncate."""

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
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.connections import connect, keep_open
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.keys import BIGINT, Key
from airflow_pgchange.feeds.queries import ask, call, records, select
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.tubes.backfills import BackfillProgress, backfill_chunks, committed
from airflow_pgchange.tubes.downstream_ids import each_id

CHUNK = 10_000
"""The number of ids that are touched by one statement."""
BACKFILL_SECONDS = 60.0
"""How long scheduled backfills run, in seconds, before the worker does its other work."""

LEAST_WAIT = 1.0
"""The least time, in seconds, that each scheduled backfill may wait for transactions that write its table."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Control:
    """A control pod that is due: all earlier pods in its shard were replayed.

    - ``backfill_end``: the downstream returns its ids of ``table`` that it has not written since ``start_seq``. Without
      a table it is asked for each table in the shard.
    - ``truncate``: the downstream returns its ids of ``table`` from before ``seq``. If several are due, it is asked
      only for the last.
    - Any other ``type`` is defined by the user, with its meaning in ``payload``.
    """

    seq: int
    shard: int
    type: str
    table: str
    start_seq: int | None = None
    payload: Mapping[str, Any] = field(default_factory=dict, compare=False)


Downstream = Callable[[Control], Iterable[Key] | None]
"""A function that returns the ids that a downstream holds and may have to delete. Too many ids do no harm, because each
row is read again.

It also gets control pods of users' types, and carries them out itself. It raises Refused if a pod can never be carried
out: then the pod is deleted, and noted in ``tube.fault``. After any other error the pod stays, and is tried again.
"""


@dataclass(frozen=True)
class WorkedOff:
    """A control pod that was processed and deleted: the number of ids that it touched, or the reason why it was given
    up."""

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
    """Process the control pods of a worker that are due.

    First run the scheduled backfills, for about ``backfill_timeout`` in all. ``on_progress`` is called after each
    chunk. A backfill that is not finished by then, or that a person has paused, continues next time. Then touch the ids
    that the downstream returns. The worker reads their rows again, and deletes the rows that are gone. Exactly once:
    the touches and the deletion of the pods are one transaction, which holds the worker's lock.

    A control pod that can never be processed is deleted, with a log line and a row in ``tube.fault``. If a pod fails
    otherwise, the other pods are still processed, and the first error is raised at the end. It is InvalidArgument if
    the downstream returned an invalid id. Raises ConsumerBusy if the worker is busy for longer than ``busy_timeout``,
    and Stopped.
    """
    turn = _Turn(feed, downstream, seconds("backfill_timeout", backfill_timeout), on_progress, stopped)
    turn.carry_out_backfills(source)
    done = []
    with ConsumerTransaction(feed, source, busy_timeout=busy_timeout, stopped=stopped) as consumer:
        if consumer.busy:
            raise ConsumerBusy(f"{feed.name} is busy: another transaction works on it")
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
                log.exception("%s: control pod %s failed, the next run will retry it", feed.name, row["seq"])
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
    """One run over the control pods of a worker.

    By the seq of a pod: ``ended`` has the number of rows that a finished scheduled backfill has read. ``refused`` has
    the reason why a backfill is not possible. ``covered`` are truncations before a later truncation of the same table.
    ``failed`` is the first error.
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
        # Work on at least one backfill, whatever the deadline, so that even short runs finish backfills. A backfill that
        # only waited for writers does not count.
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
        """Run a scheduled backfill until ``deadline``. Return whether it has made progress."""
        try:
            number = committed(connection, self._about("tube.backfill_scheduled", seq))
        except BatchNotFinished:
            # Another process has finished it meanwhile.
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
        """Process a control pod in a savepoint. Return None if the pod stays for the next run."""
        seq = row["seq"]
        try:
            with translated(), connection.transaction():
                return self._done(connection, row)
        except Refused as error:
            reason = str(error)
        with translated(), connection.transaction():
            ask(connection, self._about("tube.give_up", seq, reason))
        log.warning(
            "%s: control pod %s was given up: %s; its payload was %s",
            self.feed.name,
            seq,
            reason,
            row["payload"],
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
        """Return the control pods for which to ask the downstream.

        The end of a backfill may name no table, because older tubes wrote it so. Then it stands for each table in its
        shard. Raises Refused if there is no such table.
        """
        if control.type != "backfill_end" or control.table:
            return [control]
        attached = Attached.all(self.feed.tube, ask(connection, self.feed.attached()))
        tables = [each.table for each in attached if each.shard == control.shard]
        if not tables:
            raise Refused(f"it names no table, and none is attached under shard {control.shard}")
        return [replace(control, table=table) for table in tables]

    def _collect(self, connection: psycopg.Connection[Any], questions: list[Control]) -> int:
        """Touch the ids that the downstream returns, and return their number. Raises Refused if it refuses all
        questions."""
        touched, refusals = 0, list[Refused]()
        types = tuple(ask(connection, self.feed.key_types()))
        collect = "tube.collect" if types == BIGINT else "tube.collect_keys"
        for question in questions:
            try:
                answer: Any = self.downstream(question) or ()
                # Close a generator at once: if we keep its error, the traceback would keep its connections open.
                with closing(answer) if hasattr(answer, "close") else nullcontext():
                    held = each_id(answer, types)
                    while ids := list(islice(held, CHUNK)):
                        if self.stopped():
                            raise Stopped(f"{self.feed.name}: stopped before the control pods were processed")
                        touched += ask(connection, self._about(collect, question.seq, ids))
            except Refused as error:
                refusals.append(error)
                log.warning(
                    "%s: the downstream refused control pod %s: %s", self.feed.name, question.seq, error
                )
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
    """Return the truncations before a later truncation of the same table and shard.

    The later truncation covers their ids. Asking for each of them would touch every id as often as the table was
    truncated.
    """
    truncations = {
        row["seq"]: (row["op"], row["shard"], row["tbl"]) for row in due if row["type"] == "truncate"
    }
    last = {subject: seq for seq, subject in truncations.items()}
    return truncations.keys() - last.values()


def _control(row: Mapping[str, Any]) -> Control:
    """Return the control pod in a row. Raises Refused if its payload is not valid."""
    payload = row["payload"]
    if not isinstance(payload, dict) or not isinstance(payload.get("type"), str) or not payload["type"]:
        raise Refused("its payload is not an object with a type")
    kind, table, start = payload["type"], payload.get("tbl"), str(payload.get("start_seq", ""))
    is_of_shard = kind == "backfill_end" and table is None
    if (
        kind in ("backfill_schedule", "backfill_end", "truncate")
        and not isinstance(table, str)
        and not is_of_shard
    ):
        raise Refused("it names no table")
    if kind == "backfill_end" and not start.isdecimal():
        raise Refused(f"start_seq is {start!r}, but must be the number of a pod")
    return Control(
        seq=row["seq"],
        shard=row["shard"],
        type=kind,
        table=row["tbl"] or "",
        start_seq=int(start) if start.isdecimal() else None,
        payload=payload,
    )
