"""A connection without a server: it keeps what a callable executes."""

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
"""What psycopg says to a callable that ends the transaction of its batch."""


@dataclass(frozen=True)
class Statement:
    """What would be sent to PostgreSQL: the query, and its parameters apart. Each execution of ``executemany`` is a
    statement of its own; the rows of a ``copy`` are the parameters of its one statement."""

    query: str
    parameters: Any = None


Answer = Callable[[Statement], Rows | None]
"""The rows that a statement returns; None for a statement whose rows nobody reads."""


@dataclass
class RecordedConnection:
    """A stand-in for the connection of a batch: ``statements`` has what would be committed.

    A block of ``transaction()`` that ends with an error takes its statements back. ``answer`` returns the rows of a
    statement. If it returns None and the callable reads them, InvalidArgument is raised.
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
        kept = len(self.statements)
        block: Any = _Block()
        try:
            yield block
        except psycopg.Rollback as rollback:
            del self.statements[kept:]
            if rollback.transaction not in (None, block):
                raise
        except BaseException:
            del self.statements[kept:]
            raise
        else:
            if force_rollback:
                del self.statements[kept:]

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
            f"connection.{name} needs a server, and this test has none: give a connection to PostgreSQL"
        )


class _Block:
    """What ``with connection.transaction() as block`` names."""


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
                f"the callable reads what PostgreSQL answers to {query!r:.300}, and this test has no server: give its "
                "rows by answer=, or a connection to PostgreSQL"
            )
        return self._rows


@dataclass
class RecordedCopy:
    """What is written by ``with cursor.copy(...) as copy``."""

    rows: list[Any] = field(default_factory=list)

    def write_row(self, row: Sequence[Any]) -> None:
        self.rows.append(tuple(row))

    def write(self, buffer: str | bytes) -> None:
        self.rows.append(buffer)

    def set_types(self, types: Sequence[Any]) -> None:
        """Types matter to PostgreSQL alone."""


def _text(query: Any) -> str:
    if isinstance(query, sql.Composable):
        return query.as_string(None)
    return query.decode() if isinstance(query, bytes) else str(query)
