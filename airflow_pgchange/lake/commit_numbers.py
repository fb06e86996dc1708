"""Numbers of one transaction for each table of a lake, kept in settings of the transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import transaction_settings
from airflow_pgchange.lake.tables import LakeTable


def next_number(connection: psycopg.Connection[Any], table: str) -> int:
    """Return the number of the next write of this transaction to the table, from 1.

    A retry of a batch writes in the same order. So the batch's id and this number identify a write. ``table`` is the id
    in the table's own metadata, because a table can have several names or locations.
    """
    return int(
        transaction_settings.change(connection, _name("writes", table), "coalesce({last}::integer, 0) + 1")
    )


def metadata_number(connection: psycopg.Connection[Any], table: str, following: int) -> int:
    """Return the number of the metadata file of a commit: ``following``, or the number of the transaction's first commit.

    So a transaction that is rolled back has used only one number, however many commits it has made.
    """
    name, first = _name("metadata", table), "coalesce({last}::integer, {following})"
    return int(transaction_settings.change(connection, name, first, following=following))


def _name(kind: str, table: str) -> str:
    return f"pgchange.{kind}_{hashlib.sha256(table.encode()).hexdigest()[:16]}"


@contextmanager
def one_write(connection: psycopg.Connection[Any], lake: LakeTable) -> Iterator[None]:
    """Return the number of the write if the block fails, so that a retry gets the same number."""
    check_transaction(connection, lake)
    # Begin the transaction now. Otherwise the block below would begin it, and commit it at its end.
    connection.execute("select")
    with connection.transaction():
        yield


def check_transaction(connection: psycopg.Connection[Any], lake: LakeTable) -> None:
    """Raise InvalidArgument outside of a transaction, because the settings would be lost after each statement."""
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidArgument(
            f"{lake}: a batch is written in its consumer transaction: give the connection that the operator passes"
        )
