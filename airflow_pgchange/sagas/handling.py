"""What becomes of a message of a saga: it is done, tried again later, or the saga is rolled back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import psycopg

from airflow_pgchange.feeds.batch import Change
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.queries import ask, select

Kind = Literal["step", "end", "compensation", "rolled back"]
MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class Work:
    """What a handler is called for.

    ``kind`` says whether to do ``step``, to undo it (``compensation``), or that all is done (``end``) or undone
    (``rolled back``). ``tries`` counts from 1. ``was_done``: the step was committed; a compensation is called for where
    it was not too, as a handler may have been killed between what it did elsewhere and its commit. ``reason`` is why the
    saga is rolled back.
    """

    saga: int
    name: str
    kind: Kind
    step: str | None
    data: dict[str, str | None]
    tries: int
    was_done: bool
    reason: str | None


@dataclass(frozen=True)
class TryAgain:
    """A handler's answer: not now, but ``after`` this time, unless that was the last try."""

    reason: str
    after: timedelta = MINUTE


@dataclass(frozen=True)
class RollBack:
    """A handler's answer: the step cannot be done, so undo the saga."""

    reason: str


Answer = TryAgain | RollBack | None


class _NotKept(Exception):
    """What a handler wrote is rolled back; not psycopg.Rollback, which a lost connection would let through."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


Do = Callable[[Work, psycopg.Connection[Any]], Answer]


def handle(
    connection: psycopg.Connection[Any], change: Change, do: Do, *, max_tries: int | None = None
) -> str:
    """Do what the message of a saga asks for, in the transaction that receives it; returns what became of it.

    ``do(work, connection)`` answers None where it is done: what it wrote through ``connection`` is kept with that. What
    it wrote before another answer is rolled back. ``TryAgain`` puts the message back, ``RollBack`` undoes the saga, and
    so does a step's ``TryAgain`` at its ``max_tries``-th try. A compensation cannot be rolled back, only tried again.
    What nobody waits for any more is not done, or not kept: then the answer is ``over``. Raises Refused where a message
    before this one was lost, received by somebody who did not do it: its step is not skipped; InvalidArgument for another
    answer.

    Guarantee: what is written through ``connection`` is there exactly once for a step that is done, and not at all for
    one that is not. What is done elsewhere is done at least once.
    """
    turn = ask(connection, select("mbus.saga_turn", change.id))
    if turn is None:
        return "over"
    work = Work(data=dict(change.data["data"] or {}), **turn)
    try:
        with connection.transaction():
            answer = do(work, connection)
            if not isinstance(answer, Answer):
                raise InvalidArgument(
                    f"saga {work.saga}: the handler answered {answer!r}: None says that it is done, "
                    "TryAgain(...) that it is not yet, RollBack(...) that it cannot be"
                )
            if answer is None and ask(connection, select("mbus.saga_done", change.id)):
                return "done"
            raise _NotKept(answer)
    except _NotKept as end:
        return "over" if end.answer is None else _put_off(connection, change, work, end.answer, max_tries)


def _put_off(
    connection: psycopg.Connection[Any],
    change: Change,
    work: Work,
    answer: TryAgain | RollBack,
    most: int | None,
) -> str:
    can_roll_back = work.kind in ("step", "end")
    if isinstance(answer, RollBack) and not can_roll_back:
        raise InvalidArgument(
            f"saga {work.saga}: a {work.kind} cannot be rolled back, as its handler asked ({answer.reason}): "
            "let it answer TryAgain"
        )
    is_last = can_roll_back and most is not None and work.tries >= most
    if isinstance(answer, TryAgain) and not is_last:
        again = select("mbus.saga_try_again", change.id, answer.after, answer.reason)
        return "again" if ask(connection, again) else "over"
    rolled_back = ask(connection, select("mbus.saga_roll_back", change.id, answer.reason))
    return "rolled back" if rolled_back else "over"
