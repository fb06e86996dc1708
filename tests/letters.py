"""Short functions to make dead letters, for the tests."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.feeds.draining import Plan, drain
from tests.commits import FEED, claim_and_fail, commits

Connection = psycopg.Connection[Any]


class Poison(Exception):
    """Raised by the processing of a bad batch."""


def give_up(
    connection: Connection, db: str, n: int = 3, feed: CommitFeed = FEED, source: str | None = None, **to: Any
) -> tuple[int, list[int]]:
    """Write ``n`` commits, let their consumer claim them, and give the batch up.

    Return the number of the dead letter, and the commits.
    """
    at = to.get("at") or connection
    ids = commits(at, n)
    claim_and_fail(db, source, feed, limit=n)
    manual_operations.skip_batch(connection, at, feed, "cannot be parsed")
    return dead_letters.letters(connection)[-1].id, ids


def only(connection: Connection) -> dead_letters.Letter:
    """Return the only dead letter."""
    (letter,) = dead_letters.letters(connection)
    return letter


def plan(db: str, source: str | None = None, **options: Any) -> Plan:
    given = {"feed": FEED, "max_batches": None, "max_attempts": 1, "on_give_up": "dead_letter", **options}
    return Plan(results=db, source=source, **given)


def drain_but(bad: set[int], given: Plan) -> list[int]:
    """Drain the feed with a plan whose batches fail if they contain a bad commit.

    Return the processed changes, in order.
    """
    done: list[int] = []

    def process(transaction: Any, batch: Any) -> None:
        ids = [change.id for change in transaction.changes()]
        if bad & set(ids):
            raise Poison(f"cannot parse {min(bad & set(ids))}")
        transaction.ack()
        done.extend(ids)

    drain(given, process)
    return done
