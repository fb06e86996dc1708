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
KEPT = "pgchange_refused"


class RefusedStatement(NamedTuple):
    """A statement, and the role that ran it."""

    role: str
    text: str


class Cursor(psycopg.ClientCursor[Any]):
    """A cursor whose errors about a missing right know their statement."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Self:
        with refusal_kept(self.connection, query):
            return super().execute(query, *args, **kwargs)


class AsyncCursor(psycopg.AsyncClientCursor[Any]):
    """A cursor whose errors about a missing right know their statement."""

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Self:
        with refusal_kept(self.connection, query):
            return await super().execute(query, *args, **kwargs)


@contextmanager
def refusal_kept(connection: Session, query: Any) -> Iterator[None]:
    """Keep the role and the statement with an error of this block about a missing right.

    Both are texts, because a reference to the connection would keep it open.
    """
    try:
        yield
    except InsufficientPrivilege as error:
        text = query.as_string(connection) if isinstance(query, sql.Composable) else str(query)
        vars(error).setdefault(KEPT, RefusedStatement(role_of(connection), text))
        raise


def refused_statement(error: psycopg.Error) -> RefusedStatement | None:
    """Return the statement that an error refused, if it was kept."""
    kept: RefusedStatement | None = vars(error).get(KEPT)
    return kept
