"""Numbers of one transaction for each table of a lake, kept in settings of the transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import settings
from airflow_pgchange.lake.tables import LakeTable


def next_number(connection: psycopg.Connection[Any], table: str) -> int:
    """Return the number of the next write to the table with this id in this transaction, from 1.

    A batch that comes again writes in the same order. So a write is known by the id of its batch and by its number. The
    id is that in the table's own metadata, because one table can have several names or locations.
    """
    return int(settings.change(connection, _name("writes", table), "coalesce({last}::integer, 0) + 1"))


def metadata_number(connection: psycopg.Connection[Any], table: str, following: int) -> int:
    """Return the number of the metadata file of a commit: ``following``, or the number of the transaction's first commit.

    So a transaction that is rolled back leaves no other numbers than one, however many commits it has made.
    """
    name, first = _name("metadata", table), "coalesce({last}::integer, {following})"
    return int(settings.change(connection, name, first, following=following))


def _name(kind: str, table: str) -> str:
    return f"pgchange.{kind}_{hashlib.sha256(table.encode()).hexdigest()[:16]}"


@contextmanager
def one_write(connection: psycopg.Connection[Any], lake: LakeTable) -> Iterator[None]:
    """Give the number of the write back if the block fails, so that the same write gets it again."""
    check_transaction(connection, lake)
    # Without a transaction, the block below would begin one, and commit it.
    connection.execute("select")
    with connection.transaction():
        yield


def check_transaction(connection: psycopg.Connection[Any], lake: LakeTable) -> None:
    """Raise InvalidArgument outside of a transaction, where the settings would be gone after the statement."""
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidArgument(
            f"{lake}: a batch is written in its consumer transaction: give the connection that the operator passes"
        )
