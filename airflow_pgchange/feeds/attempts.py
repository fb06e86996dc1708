"""The role and the statement of an error about a missing right. The error of the driver has neither."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import psycopg
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from airflow_pgchange.feeds.watched_connection import role_of

Session = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
KEPT = "pgchange_attempt"


class Attempt(NamedTuple):
    """A statement, and the role that ran it."""

    role: str
    statement: str


class Cursor(psycopg.ClientCursor[Any]):
    """A cursor whose errors know their attempt."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Self:
        with attempted(self.connection, query):
            return super().execute(query, *args, **kwargs)


class AsyncCursor(psycopg.AsyncClientCursor[Any]):
    """A cursor whose errors know their attempt."""

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Self:
        with attempted(self.connection, query):
            return await super().execute(query, *args, **kwargs)


@contextmanager
def attempted(connection: Session, query: Any) -> Iterator[None]:
    """Keep the attempt with an error of this block, as texts: a reference would keep the connection open."""
    try:
        yield
    except InsufficientPrivilege as error:
        text = query.as_string(connection) if isinstance(query, sql.Composable) else str(query)
        vars(error).setdefault(KEPT, Attempt(role_of(connection), text))
        raise


def attempt_of(error: psycopg.Error) -> Attempt | None:
    """Return the attempt that failed with an error, if it was kept."""
    attempt: Attempt | None = vars(error).get(KEPT)
    return attempt
