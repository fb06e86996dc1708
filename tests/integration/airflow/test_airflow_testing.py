"""A user's test without a server gives the same results as the operator with a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from airflow_pgchange.feeds import Batch, Change
from airflow_pgchange.testing import run_batch_once
from tests.ledger import FEED, Connect, audit, make_ledger, operator, run


@pytest.fixture
def shop(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> psycopg.Connection[Any]:
    """A database with a ledger of three rows, and Airflow's connection to it."""
    from tests.airflow_home import uri

    connection = connect()
    make_ledger(connection)
    connection.execute("insert into ledger select from generate_series(1, 3)")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(db))
    return connection


def yields(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> Iterator[int]:
    yield 1


def commits(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
    connection.commit()


def rolls_back(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
    connection.rollback()


def raises(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
    connection.execute("insert into audit values (1)")
    raise KeyError("ann")


@pytest.mark.parametrize("process", [yields, commits, rolls_back, raises])
def test_an_error_is_the_operators(shop: psycopg.Connection[Any], process: Callable[..., Any]) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    task = operator("shop", process=process)
    with pytest.raises(Exception) as real:  # noqa: PT011
        run(task)
    with pytest.raises(type(real.value)) as given:
        run_batch_once(task, [1, 2, 3])
    assert str(given.value) == str(real.value)


def test_the_changes_are_those_that_the_feed_hands_out(shop: psycopg.Connection[Any]) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    seen: list[list[Change]] = []

    def note(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
        seen.append(list(changes))

    task = operator("shop", process=note)
    run(task)
    run_batch_once(task, [1, 2, 3])
    real, given = seen
    assert [change.id for change in given] == [change.id for change in real] == [1, 2, 3]
    for changes in (real, given):
        assert [(type(change.position), change.data) for change in changes] == [(str, {})] * 3


def test_what_is_written_to_a_connection_is_kept_and_a_failure_is_not(
    shop: psycopg.Connection[Any], connect: Connect
) -> None:
    run_batch_once(operator("shop"), [7, 8], connection=shop)
    run_batch_once(operator("shop"), [9], postgres_conn_id="shop")
    with pytest.raises(KeyError):
        run_batch_once(operator("shop", process=raises), [1], connection=shop)
    with pytest.raises(errors.UniqueViolation):
        run_batch_once(operator("shop"), [9], postgres_conn_id="shop")
    assert connect().execute("select id from audit order by id").fetchall() == [(7,), (8,), (9,)]
    assert run(operator("shop"))["changes"] == 3


def test_an_open_transaction_decides_what_is_kept(db: str, shop: psycopg.Connection[Any]) -> None:
    with psycopg.connect(db) as connection:
        connection.execute("select 1")
        run_batch_once(operator("shop"), [7], connection=connection)
        assert connection.execute("select id from audit").fetchall() == [(7,)]
        connection.rollback()
    assert shop.execute("select id from audit").fetchall() == []


@pytest.mark.parametrize("is_real", [False, True])
def test_a_deadlock_is_tried_again_as_the_operator_does(shop: psycopg.Connection[Any], is_real: bool) -> None:
    tries: list[int] = []

    def late(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
        connection.execute(sql.SQL("insert into audit values ({})").format(len(tries)))
        tries.append(batch.attempt)
        if len(tries) == 1:
            raise errors.DeadlockDetected("chosen")

    done = run_batch_once(operator("shop", process=late), [1], connection=shop if is_real else None)
    assert tries == [1, 1]
    kept = shop.execute("select id from audit").fetchall()
    written = [statement.query for statement in done.statements]
    assert (kept, written) == (([(1,)], []) if is_real else ([], ["insert into audit values (1)"]))


def test_the_audit_of_a_batch_is_one_statement_a_change() -> None:
    statements = run_batch_once(operator("shop", process=audit), [5, 6]).statements
    assert [statement.parameters[0] for statement in statements] == [5, 6]
    assert FEED.name == "commits:audit/0"
