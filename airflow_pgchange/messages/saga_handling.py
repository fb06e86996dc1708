"""What becomes of a message of a saga: it is done, tried again later, or the saga is rolled back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import psycopg
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument, Stopped
from airflow_pgchange.feeds.batch import Change
from airflow_pgchange.feeds.checks import Seconds, is_sendable, seconds, span
from airflow_pgchange.feeds.error_text import LONGEST, described
from airflow_pgchange.feeds.queries import ask, select

Kind = Literal["step", "end", "compensation", "rolled back"]
MINUTE = timedelta(minutes=1)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What a handler is called for.

    ``kind`` says whether to do ``step``, to undo it (``compensation``), or that all is done (``end``) or undone
    (``rolled back``). ``attempt`` counts from 1, those too that failed or whose process died. ``was_done``: the step was
    committed; a compensation is called for where it was not too, as a handler may have been killed between what it did
    elsewhere and its commit. ``reason`` is why the saga is rolled back.
    """

    saga: int
    name: str
    kind: Kind
    step: str | None
    data: dict[str, str | None]
    attempt: int
    was_done: bool
    reason: str | None

    @property
    def can_roll_back(self) -> bool:
        return self.kind in ("step", "end")


@dataclass(frozen=True)
class TryAgain:
    """A handler's answer: not now, but after this ``delay``, unless that was the last try."""

    reason: str
    delay: Seconds = MINUTE


@dataclass(frozen=True)
class RollBack:
    """A handler's answer: the step cannot be done, so undo the saga."""

    reason: str


Answer = TryAgain | RollBack | None


@dataclass(frozen=True)
class _Failed(TryAgain):
    """Not an answer: the handler raised."""


class _NotKept(Exception):
    """What a handler wrote is rolled back; not psycopg.Rollback, which a lost connection would let through."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


Do = Callable[[Work, psycopg.Connection[Any]], Answer]


def handle_saga(
    connection: psycopg.Connection[Any], change: Change, do: Do, *, max_attempts: int | None = None
) -> str:
    """Do what the message of a saga asks for, in the transaction that receives it; returns what became of it.

    ``do(work, connection)`` answers None where it is done: what it wrote through ``connection`` is kept with that. What
    it wrote before another answer is rolled back. ``TryAgain`` puts the message back, ``RollBack`` undoes the saga. Where
    it raises, answers something else, or wrote what a deferred constraint refuses, that is logged, and the message put
    back: then this is ``failed``. A step's ``max_attempts``-th try is its last, however it ends: what is not done then is
    rolled back, as is a step that comes after the saga's deadline. A compensation cannot be rolled back, only tried
    again. What nobody waits for any more is not done, or not kept: then this is ``over``. A message before this one may
    have been lost, received by somebody who did not do it. Its step is not skipped: this one ``failed``, without having
    been tried, and comes again until the saga's deadline. Call it for each message of a batch, in order: if one of them
    rolls a saga back, the others of that saga are ``over``.

    Guarantee: what is written through ``connection`` is there exactly once for a step that is done, and not at all for
    one that is not. What is done elsewhere is done at least once.
    """
    turn = ask(connection, select("mbus.saga_turn", change.id))
    if turn is None:
        return "over"
    overdue, lost = turn.pop("overdue"), turn.pop("lost")
    work = Work(data=dict(change.data["data"] or {}), attempt=turn.pop("tries"), **turn)
    most = max_attempts if max_attempts is not None and work.can_roll_back else math.inf
    if overdue is not None:
        end: str | TryAgain | RollBack = RollBack(overdue)
    elif lost is not None:
        log.error("%s", lost)
        return _put_back(connection, change, _Failed(lost))
    elif work.attempt > most:
        end = RollBack(f"tried {work.attempt - 1} times, and the last handler died")
    else:
        end = _tried(connection, change, do, work)
    if isinstance(end, str):
        return end
    if isinstance(end, RollBack) or work.attempt >= most:
        rolled_back = ask(connection, select("mbus.saga_roll_back", change.id, end.reason))
        return "rolled back" if rolled_back else "over"
    return _put_back(connection, change, end)


def _put_back(connection: psycopg.Connection[Any], change: Change, end: TryAgain) -> str:
    if ask(connection, select("mbus.saga_try_again", change.id, span("delay", end.delay), end.reason)):
        return "failed" if isinstance(end, _Failed) else "again"
    return "over"


def _tried(
    connection: psycopg.Connection[Any], change: Change, do: Do, work: Work
) -> str | TryAgain | RollBack:
    """What became of a try: ``done`` or ``over``, or why it is put off, and then nothing that it wrote is kept."""
    try:
        with connection.transaction():
            answer = answer_of(do, work, connection)
            # What is checked at the commit only would be nobody's failure there.
            connection.execute("set constraints all immediate")
            if answer is None and ask(connection, select("mbus.saga_done", change.id)):
                return "done"
            raise _NotKept(answer)
    except _NotKept as end:
        return end.answer or "over"
    except (Stopped, psycopg.errors.DeadlockDetected):
        raise
    except Exception as error:
        if connection.closed:
            raise
        what = work.step or work.kind
        log.exception("saga %s %d: try %d of %s failed", work.name, work.saga, work.attempt, what)
        known = make_conninfo("", password=connection.info.password)
        return _Failed(described(error, [known])[:LONGEST])


def answer_of(do: Do, work: Work, connection: psycopg.Connection[Any]) -> Answer:
    """Call a handler. Raises InvalidArgument for what is no answer to this message."""
    answer = do(work, connection)
    if not isinstance(answer, Answer):
        raise InvalidArgument(
            f"saga {work.saga}: the handler answered {answer!r}: None says that it is done, "
            "TryAgain(...) that it is not yet, RollBack(...) that it cannot be"
        )
    if answer is not None and not (isinstance(answer.reason, str) and is_sendable(answer.reason)):
        raise InvalidArgument(
            f"saga {work.saga}: the handler's reason must be a text without zero bytes and lone surrogates, "
            f"not {answer.reason!r:.300}"
        )
    if isinstance(answer, TryAgain):
        seconds(f"saga {work.saga}: the handler's delay", answer.delay)
    if isinstance(answer, RollBack) and not work.can_roll_back:
        raise InvalidArgument(
            f"saga {work.saga}: a {work.kind} cannot be rolled back, as its handler asked ({answer.reason}): "
            "let it answer TryAgain"
        )
    return answer
