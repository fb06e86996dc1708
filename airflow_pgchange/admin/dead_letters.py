"""Dead letters: what consumers of any feed gave up, to be looked at, sent again or dropped.

A letter lies where its consumer's progress is kept: of the commit queue in the database of the results, of a tube in the
tube's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import (
    HistoryTrimmed,
    InvalidArgument,
    LetterRefused,
    PermissionDenied,
    SourceRestored,
    UnknownBranch,
    UnknownConsumer,
    UnknownLetter,
)
from airflow_pgchange.feeds.checks import Seconds, span
from airflow_pgchange.feeds.queries import ask, records, rows, select

HINDRANCES = (HistoryTrimmed, LetterRefused, SourceRestored, UnknownBranch, UnknownConsumer)


@dataclass(frozen=True)
class Letter:
    """A batch, an event or a message that a consumer gave up.

    ``reason`` says why, ``error`` what the last of its ``attempts`` failed on. ``sent_at`` is when it was sent again
    last, None for never; ``on_its_way``: its consumer has yet to process it. ``hindrance``: why it can no longer be sent.
    """

    id: int
    kind: str
    consumer: str
    batch_id: Any
    changes: int
    reason: str
    error: str | None
    attempts: int
    given_up_by: str
    given_up_at: datetime
    sent_at: datetime | None
    on_its_way: bool
    hindrance: str | None


@dataclass(frozen=True)
class ErasedLetter:
    """A letter from which a key was erased. ``erased`` is how many of its changes went: 0 if only its error or reason had
    the key."""

    id: int
    erased: int


def letters(
    connection: psycopg.Connection[Any],
    source: psycopg.Connection[Any] | None = None,
    *,
    consumer: str | None = None,
    older_than: Seconds | None = None,
) -> list[Letter]:
    """The letters that this role may see, the oldest first; of a consumer as ``status`` names it, or older than an age.

    ``source`` is asked whether it still has the changes of those that lie in another database than their changes.
    """
    names = sql.SQL(", ").join(sql.Identifier(field.name) for field in fields(Letter))
    query = sql.SQL("select {} from pgchange.letters({}, {}) order by id")
    found = records(connection, query.format(names, consumer, span("older_than", older_than)))
    letters = [Letter(**row) for row in found]
    if source is None or source is connection:
        return letters
    return [_seen_from(source, connection, letter) for letter in letters]


def letter_content(connection: psycopg.Connection[Any], number: int) -> Any:
    """What a letter holds, which its kind decides: of a batch of the commit queue where it begins and ends and the
    first of its commits, of a tube its ids, of a group its events, of a queue its messages. Raises UnknownLetter."""
    _check_numbers([number])
    held = ask(connection, select("pgchange.letter_content", number))
    if held is None:
        raise UnknownLetter(
            f"there is no dead letter {number}: it was sent again or dropped, or is not yours to see"
        )
    return held


def redrive(
    connection: psycopg.Connection[Any],
    source: psycopg.Connection[Any] | None = None,
    *,
    ids: Sequence[int] = (),
    consumer: str | None = None,
    older_than: Seconds | None = None,
) -> list[int]:
    """Send letters again, to their consumers alone; returns which.

    Either those of ``ids``, all or none; or of those that ``listed`` finds all that can be sent. Once, however many ask:
    a tube's ids are touched again now, a batch of the commit queue comes with its consumer's next claim. Raises
    UnknownLetter, LetterRefused, HistoryTrimmed, SourceRestored, PermissionDenied, InvalidArgument.
    """
    _check_choice(ids, consumer, older_than)
    if ids:
        with connection.transaction():
            for number in ids:
                _send(connection, source, number)
        return list(ids)
    sent = []
    for letter in letters(connection, source, consumer=consumer, older_than=older_than):
        if letter.on_its_way or letter.hindrance is not None:
            continue
        try:
            _send(connection, source, letter.id)
        except (UnknownLetter, PermissionDenied, *HINDRANCES):
            continue
        sent.append(letter.id)
    return sent


def drop_letters(
    connection: psycopg.Connection[Any],
    *,
    ids: Sequence[int] = (),
    consumer: str | None = None,
    older_than: Seconds | None = None,
) -> list[int]:
    """Forget letters: those of ``ids``, all or none, or those of a consumer or older than an age. Returns which.

    What they stand for is gone. Raises UnknownLetter, PermissionDenied, InvalidArgument.
    """
    _check_choice(ids, consumer, older_than)
    if ids:
        with connection.transaction():
            for number in ids:
                ask(connection, select("pgchange.drop_letters", number))
        return list(ids)
    query = sql.SQL("select pgchange.drop_letters(null, {}, {})")
    return [number for (number,) in rows(connection, query.format(consumer, span("older_than", older_than)))]


def erase_letters(
    connection: psycopg.Connection[Any], key: str, *, field: str | None = None, consumer: str | None = None
) -> list[ErasedLetter]:
    """Erase from letters, or from those of a consumer, what belongs to one key. Return the letters that were changed.

    ``key`` is the iid of a message, the id of an event, or an id in a tube. With ``field`` it is the value of that field
    in a message's properties or data, or in the payload of an event or a touch; ``customer.id`` names a field in a field.
    Raises PermissionDenied if this role may see one of the letters but not drop it, InvalidArgument.
    """
    query = sql.SQL("select letter, erased from pgchange.erase_letters({}, {}, {})")
    return [ErasedLetter(*found) for found in rows(connection, query.format(key, field, consumer))]


def _send(connection: psycopg.Connection[Any], source: psycopg.Connection[Any] | None, number: int) -> None:
    if source is not None and source is not connection:
        _ask_source(source, connection, number)
    ask(connection, select("pgchange.redrive", number))


def _seen_from(
    source: psycopg.Connection[Any], connection: psycopg.Connection[Any], letter: Letter
) -> Letter:
    if letter.hindrance is not None:
        return letter
    try:
        _ask_source(source, connection, letter.id)
    except HINDRANCES as error:
        return replace(letter, hindrance=str(error))
    return letter


def _ask_source(source: psycopg.Connection[Any], connection: psycopg.Connection[Any], number: int) -> None:
    """Raise the reason why the source cannot give again what a letter stands for."""
    query = sql.SQL(
        "select jsonb_build_array(l.kind, l.address, l.content) "
        "from pgchange.letter as l join pgchange.registered as r using (kind) where l.id = {} and r.letters_elsewhere"
    )
    found = ask(connection, query.format(number))
    if found is not None:
        ask(source, select("pgchange.check_letter", *found))


def _check_choice(ids: Sequence[int], consumer: str | None, older_than: Seconds | None) -> None:
    _check_numbers(ids)
    if bool(ids) == (consumer is not None or older_than is not None):
        raise InvalidArgument("say which letters: either their numbers, or their consumer or age")


def _check_numbers(ids: Sequence[int]) -> None:
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
            raise InvalidArgument(
                f"{number!r} is not the number of a letter: list them with `airflow-pgchange letters list`"
            )
