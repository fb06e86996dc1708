"""The writes of one transaction to a table of a lake, counted in a setting of the transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.lake.tables import LakeTable


def next_number(connection: psycopg.Connection[Any], lake: LakeTable) -> int:
    """Return the number of the next write to the table in this transaction, from 1.

    A batch that comes again writes in the same order. So a write is known by the id of its batch and by its number.
    """
    name = f"pgchange.writes_{hashlib.sha256(str(lake).encode()).hexdigest()[:16]}"
    query = sql.SQL(
        "select pg_catalog.set_config({0}, "
        "(coalesce(nullif(pg_catalog.current_setting({0}, true), ''), '0')::integer + 1)::text, true)::integer"
    )
    number: int = ask(connection, query.format(sql.Literal(name)))
    return number


@contextmanager
def one_write(connection: psycopg.Connection[Any], lake: LakeTable) -> Iterator[None]:
    """Give the number of the write back if the block fails, so that the same write gets it again.

    Raises InvalidArgument outside of a transaction, where the setting would be gone after the statement.
    """
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidArgument(
            f"{lake}: a batch is written in its consumer transaction: give the connection that the operator passes"
        )
    # Without a transaction, the block below would begin one, and commit it.
    connection.execute("select")
    with connection.transaction():
        yield
