"""Handle one message of a saga. Its step is then done, retried later, or the saga is rolled back."""

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
from airflow_pgchange.feeds.argument_checks import Seconds, is_sendable, seconds, span
from airflow_pgchange.feeds.batch import Change
from airflow_pgchange.feeds.error_text import LONGEST, described
from airflow_pgchange.feeds.queries import ask, select

Kind = Literal["step", "end", "compensation", "rolled back"]
MINUTE = timedelta(minutes=1)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """The work that a handler is called for.

    ``kind`` is ``step`` to do ``step``, ``compensation`` to undo it, ``end`` if all steps are done, or ``rolled back`` if
    all are undone. ``attempt`` counts from 1, and includes attempts that failed or whose process died. ``reason`` says
    why the saga is rolled back.

    ``was_done`` says whether the step was committed. A compensation is also called for a step that was not committed. Its
    handler may have been killed after its work in other systems and before its commit.
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
    """A handler's answer: put the message back and try it again after ``delay``, unless this was the last attempt."""

    reason: str
    delay: Seconds = MINUTE


@dataclass(frozen=True)
class RollBack:
    """A handler's answer: the step cannot be done, so roll the saga back."""

    reason: str


Answer = TryAgain | RollBack | None


@dataclass(frozen=True)
class _Failed(TryAgain):
    """The handler raised an exception. This is no answer that a handler can give."""


class _NotKept(Exception):
    """Rolls back the writes of a handler.

    We do not use psycopg.Rollback: if the connection was lost, psycopg raises it again, and nothing here would catch it.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


Do = Callable[[Work, psycopg.Connection[Any]], Answer]


def handle_saga(
    connection: psycopg.Connection[Any], change: Change, do: Do, *, max_attempts: int | None = None
) -> str:
    """Handle the message of a saga in the transaction that receives it, and return the outcome.

    The outcome is ``done``, ``again``, ``failed``, ``rolled back`` or ``over``. Call this for each message of a batch, in
    order.

    - ``done``: ``do(work, connection)`` answered None. Its writes through ``connection`` are kept. Before any other
      outcome they are rolled back.
    - ``again``: it answered ``TryAgain``, and the message was put back.
    - ``failed``: it raised, gave an invalid answer, or violated a deferred constraint. The error was logged, and the
      message was put back. ``failed`` is also the outcome, without a call, if the message of an earlier step was lost:
      somebody received it and did not do the step. This message then comes again until the saga's deadline.
    - ``rolled back``: it answered ``RollBack``, the attempt was the step's ``max_attempts``-th and the step was not done,
      or the saga's deadline has passed. A compensation cannot be rolled back, only tried again.
    - ``over``: the saga does not wait for this message any more, for example because an earlier message of the batch
      rolled the saga back. Nothing was done or kept.

    Guarantee: writes through ``connection`` happen exactly once for a step that is done, and not at all for a step that
    is not. Work in other systems happens at least once.
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
    """Call the handler. Return ``done``, ``over``, or the handler's answer TryAgain or RollBack. Only ``done`` keeps its
    writes."""
    try:
        with connection.transaction():
            answer = answer_of(do, work, connection)
            # Check deferred constraints now. At the commit a violation could not be traced to this handler.
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
        step = work.step or work.kind
        log.exception("saga %s %d: try %d of %s failed", work.name, work.saga, work.attempt, step)
        # described() removes the password of this connection string from the error.
        with_password = make_conninfo("", password=connection.info.password)
        return _Failed(described(error, [with_password])[:LONGEST])


def answer_of(do: Do, work: Work, connection: psycopg.Connection[Any]) -> Answer:
    """Call a handler and return its answer. Raises InvalidArgument if the answer is not valid for this message."""
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
