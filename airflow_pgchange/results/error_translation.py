"""Translate PostgreSQL's errors about the rows of a merge into MergeRefused, with the name of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.results.staging import Staged

ONE_BY_ONE = (errors.UniqueViolation, errors.ForeignKeyViolation)
AT_THE_END = (
    "rows are written one by one and tables one after the other, so make the table's other constraints deferrable "
    "initially deferred"
)
SAME_ROW = "keys that differ in Spark are equal in the table, by its index's collation or a trigger: make them equal "
"in Spark"


@contextmanager
def refusals(staged: Staged) -> Iterator[None]:
    """Name the target in PostgreSQL's errors about its rows. Deadlocks and lost connections are raised unchanged."""
    try:
        yield
    except (
        psycopg.DataError,
        psycopg.IntegrityError,
        errors.CardinalityViolation,
        errors.RaiseException,
    ) as error:
        message = error.diag.message_primary or str(error)
        detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
        advice = ""
        if isinstance(error, ONE_BY_ONE) and staged.behaviour.needs_key:
            advice = f": {AT_THE_END}"
        elif isinstance(error, errors.CardinalityViolation) and staged.key:
            advice = f": {SAME_ROW}"
        raise MergeRefused(f"{staged.target}: {message}{detail}: nothing was written{advice}") from error
