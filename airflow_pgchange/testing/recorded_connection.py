"""A connection without a server, which records the statements that a callable executes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument

Rows = Sequence[Sequence[Any]]
FORBIDDEN = "Explicit {}() forbidden within a Transaction context. ({})"
"""The error of psycopg for a callable that commits or rolls back the transaction of its batch."""


@dataclass(frozen=True)
class Statement:
    """A statement that would be sent to PostgreSQL, with its parameters.

    Each execution of ``executemany`` is a statement. A ``copy`` is one statement, whose parameters are its rows.
    """

    query: str
    parameters: Any = None


Answer = Callable[[Statement], Rows | None]
"""Returns the rows of a statement, or None if the callable does not read them."""


@dataclass
class RecordedConnection:
    """A substitute for the connection of a batch. ``statements`` has the statements that would be committed.

    If a block of ``transaction()`` ends with an error, its statements are removed. ``answer`` returns the rows of a
    statement. If it returns None and the callable reads the rows, InvalidArgument is raised.
    """

    answer: Answer = lambda statement: None
    statements: list[Statement] = field(default_factory=list)
    closed: bool = field(default=False, init=False)
    autocommit: bool = field(default=True, init=False)

    def execute(self, query: Any, params: Any = None, **_: Any) -> RecordedCursor:
        return self.cursor().execute(query, params)

    def cursor(self, *_: Any, **__: Any) -> RecordedCursor:
        return RecordedCursor(self)

    @contextmanager
    def transaction(self, savepoint_name: str | None = None, force_rollback: bool = False) -> Iterator[Any]:
        before = len(self.statements)
        block: Any = _Block()
        try:
            yield block
        except psycopg.Rollback as rollback:
            del self.statements[before:]
            if rollback.transaction not in (None, block):
                raise
        except BaseException:
            del self.statements[before:]
            raise
        else:
            if force_rollback:
                del self.statements[before:]

    def commit(self) -> NoReturn:
        raise psycopg.ProgrammingError(
            FORBIDDEN.format(
                "commit", "Transaction will be automatically committed on successful exit from context."
            )
        )

    def rollback(self) -> NoReturn:
        raise psycopg.ProgrammingError(
            FORBIDDEN.format(
                "rollback", "Either raise Rollback() or allow an exception to propagate out of the context."
            )
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"connection.{name} needs a server, and this test has none: pass connection= to PostgreSQL"
        )


class _Block:
    """The object of ``with connection.transaction() as block``, which psycopg.Rollback can name."""


@dataclass
class RecordedCursor:
    """A cursor of a ``RecordedConnection``."""

    connection: RecordedConnection
    _executed: Statement | None = None
    _rows: list[Sequence[Any]] | None = None
    _count: int = 0

    def execute(self, query: Any, params: Any = None, **_: Any) -> Self:
        self._executed = Statement(_text(query), params)
        self.connection.statements.append(self._executed)
        answer = self.connection.answer(self._executed)
        self._rows = None if answer is None else list(answer)
        self._count = len(answer or ())
        return self

    def executemany(self, query: Any, params_seq: Iterable[Any], **_: Any) -> None:
        for params in params_seq:
            self.execute(query, params)

    def stream(self, query: Any, params: Any = None, **_: Any) -> Iterator[Sequence[Any]]:
        yield from self.execute(query, params)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **_: Any) -> Iterator[RecordedCopy]:
        copied = RecordedCopy()
        yield copied
        self.connection.statements.append(Statement(_text(statement), copied.rows))

    def fetchone(self) -> Sequence[Any] | None:
        rows = self._answered()
        return rows.pop(0) if rows else None

    def fetchmany(self, size: int = 1) -> Rows:
        rows = self._answered()
        taken, rows[:size] = rows[:size], []
        return taken

    def fetchall(self) -> Rows:
        return self.fetchmany(len(self._answered()))

    @property
    def rowcount(self) -> int:
        self._answered()
        return self._count

    def close(self) -> None:
        self._rows = None

    def __iter__(self) -> Iterator[Sequence[Any]]:
        while (row := self.fetchone()) is not None:
            yield row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answered(self) -> list[Sequence[Any]]:
        if self._rows is None:
            query = "nothing" if self._executed is None else self._executed.query
            raise InvalidArgument(
                f"the callable reads the rows of {query!r:.300}, and this test has no server: return them from answer=, "
                "or pass connection= to PostgreSQL"
            )
        return self._rows


@dataclass
class RecordedCopy:
    """The object of ``with cursor.copy(...) as copy``, which records the rows that are written."""

    rows: list[Any] = field(default_factory=list)

    def write_row(self, row: Sequence[Any]) -> None:
        self.rows.append(tuple(row))

    def write(self, buffer: str | bytes) -> None:
        self.rows.append(buffer)

    def set_types(self, types: Sequence[Any]) -> None:
        """Do nothing: types have no effect without a server."""


def _text(query: Any) -> str:
    if isinstance(query, sql.Composable):
        return query.as_string(None)
    return query.decode() if isinstance(query, bytes) else str(query)
