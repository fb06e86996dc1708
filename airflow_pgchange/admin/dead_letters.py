"""Dead letters, or letters for short: list, send again, drop or erase the batches that consumers gave up.

A letter is in the database of its consumer's progress. For the commit queue that is the database of the results, for a
tube the tube's own database.
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
from airflow_pgchange.feeds.argument_checks import Seconds, span
from airflow_pgchange.feeds.queries import ask, records, rows, select

HINDRANCES = (HistoryTrimmed, LetterRefused, SourceRestored, UnknownBranch, UnknownConsumer)


@dataclass(frozen=True)
class Letter:
    """A batch, an event or a message that a consumer gave up.

    ``reason``: why it was given up. ``error``: the error of the last of its ``attempts``. ``sent_at``: the last time
    that it was sent again, or None. ``on_its_way``: it was sent again, and its consumer has not processed it yet.
    ``hindrance``: why it cannot be sent again, or None.
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
    """A letter from which a key was erased.

    ``erased`` is the number of deleted changes. It is 0 if only the letter's error or reason contained the key.
    """

    id: int
    erased: int


def letters(
    connection: psycopg.Connection[Any],
    source: psycopg.Connection[Any] | None = None,
    *,
    consumer: str | None = None,
    older_than: Seconds | None = None,
) -> list[Letter]:
    """Return the letters that this role may see, the oldest first.

    ``consumer`` is a name as in ``status``. If the changes of letters are in another database, ``source`` is the
    connection to it; it is used to check whether these changes still exist.
    """
    names = sql.SQL(", ").join(sql.Identifier(field.name) for field in fields(Letter))
    query = sql.SQL("select {} from pgchange.letters({}, {}) order by id")
    stored = records(connection, query.format(names, consumer, span("older_than", older_than)))
    letters = [Letter(**row) for row in stored]
    if source is None or source is connection:
        return letters
    return [_seen_from(source, connection, letter) for letter in letters]


def letter_content(connection: psycopg.Connection[Any], number: int) -> Any:
    """Return the content of a letter. Raises UnknownLetter.

    For the commit queue: the bounds of the batch and its first commits. For a tube: ids. For a group: events. For a
    message queue: messages.
    """
    _check_numbers([number])
    content = ask(connection, select("pgchange.letter_content", number))
    if content is None:
        raise UnknownLetter(
            f"there is no dead letter {number}: it was sent again or dropped, or this role may not see it"
        )
    return content


def redrive(
    connection: psycopg.Connection[Any],
    source: psycopg.Connection[Any] | None = None,
    *,
    ids: Sequence[int] = (),
    consumer: str | None = None,
    older_than: Seconds | None = None,
) -> list[int]:
    """Send letters again, to their own consumers only. Return the numbers of the sent letters.

    With ``ids``: these letters, all or none. Else: all letters of ``consumer`` and ``older_than`` that can be sent. A
    letter is sent once, even if several callers send it at the same time. The ids of a tube are touched again at once;
    a batch of the commit queue comes with its consumer's next claim.

    Raises UnknownLetter, LetterRefused, HistoryTrimmed, SourceRestored, PermissionDenied, InvalidArgument.
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
    """Delete letters, with the changes in them. Return the numbers of the deleted letters.

    With ``ids``: these letters, all or none. Else: the letters of a consumer, or older than an age. Raises UnknownLetter,
    PermissionDenied, InvalidArgument.
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
    """Erase the data of one key from letters, or from those of a consumer. Return the letters that were changed.

    ``key`` is the iid of a message, the id of an event, or an id in a tube. With ``field``, it is the value of that field
    in a message's properties or data, or in the payload of an event or a touch. ``customer.id`` is a nested field. Raises
    PermissionDenied if this role may see one of the letters but not drop it, and InvalidArgument.
    """
    query = sql.SQL("select letter, erased from pgchange.erase_letters({}, {}, {})")
    return [ErasedLetter(*row) for row in rows(connection, query.format(key, field, consumer))]


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
    """Raise an error if the source no longer has the changes of a letter."""
    query = sql.SQL(
        "select jsonb_build_array(l.kind, l.address, l.content) "
        "from pgchange.letter as l join pgchange.registered as r using (kind) where l.id = {} and r.letters_elsewhere"
    )
    letter = ask(connection, query.format(number))
    if letter is not None:
        ask(source, select("pgchange.check_letter", *letter))


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
