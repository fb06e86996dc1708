"""Results that an application staged for a detached batch are merged by an ack in another process, if they are of the
same attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from airflow_pgchange.errors import BatchNotFinished, StaleClaim
from airflow_pgchange.feeds import Batch
from airflow_pgchange.results.manifests import keep, merge_kept
from tests.conftest import Role
from tests.ledger import Connect
from tests.staging import BATCH, rows_of, stage
from tests.waiting import until

Connection = psycopg.Connection[Any]


@pytest.fixture
def connection(connect: Connect) -> Connection:
    made = connect()
    made.execute("create table public.total (id bigint primary key, n bigint)")
    return made


def staged_by_an_application(connection: Connection, *rows: Sequence[int], batch: Batch = BATCH) -> None:
    kinds = {"id": "bigint", "n": "bigint"}
    keep(connection, batch, [stage(connection, "public.total", ["id"], "add", kinds, rows, batch=batch)])


def total(connection: Connection) -> list[Any]:
    return rows_of(connection, "select id, n from public.total order by id")


def left(connection: Connection) -> int:
    return len(rows_of(connection, "select from pgchange.staged_tables()"))


def test_results_that_an_application_staged_are_merged_and_removed(connection: Connection) -> None:
    staged_by_an_application(connection, (1, 10), (2, 20))
    assert [one.target for one in merge_kept(connection, BATCH)] == ["public.total"]
    assert (total(connection), left(connection)) == ([(1, 10), (2, 20)], 0)


def test_an_application_may_stage_nothing(connection: Connection) -> None:
    keep(connection, BATCH, [])
    assert merge_kept(connection, BATCH) == ()


def test_of_two_applications_on_one_attempt_the_last_that_finished_counts(connection: Connection) -> None:
    """The task was retried because its first application seemed lost.

    The results of the first are dropped with other leftovers.
    """
    staged_by_an_application(connection, (1, 10))
    staged_by_an_application(connection, (1, 11))
    merge_kept(connection, BATCH)
    assert total(connection) == [(1, 11)]
    assert len(rows_of(connection, "select pgchange.drop_leftovers('0')")) == 2
    assert left(connection) == 0


@pytest.mark.parametrize("other", [{"attempt": 1}, {"id": "batch-2"}, {"attempt": 20}, {"version": 7}])
def test_results_of_another_attempt_are_not_merged(connection: Connection, other: dict[str, Any]) -> None:
    """The attempt has another version if its batch became a dead letter that was sent again under the same id."""
    staged_by_an_application(connection, (1, 10), batch=replace(BATCH, **other))
    with pytest.raises(
        BatchNotFinished, match="no application has staged results for attempt 2 on batch batch-1"
    ):
        merge_kept(connection, BATCH)


def test_results_that_a_crash_emptied_are_not_taken_for_no_results(connection: Connection) -> None:
    """After a crash of the server, unlogged tables such as staging tables are empty."""
    staged_by_an_application(connection, (1, 10))
    for (table,) in rows_of(connection, "select name from pgchange.staged_tables()"):
        connection.execute(f"truncate pgchange_staging.{table}")
    with pytest.raises(BatchNotFinished, match="a crash of the server"):
        merge_kept(connection, BATCH)


def test_a_manifest_that_another_role_wrote_is_not_followed(
    connection: Connection, role: Callable[[str], Role]
) -> None:
    """Otherwise a forged manifest could choose what is merged into which table, with the rights of the role that acks."""
    stranger = role("stranger").name
    connection.execute(f"grant usage, create on schema pgchange_staging to {stranger}")
    connection.execute(f"set role {stranger}")
    try:
        staged = stage(connection, "public.total", ["id"], "add", {"id": "bigint", "n": "bigint"}, [(1, 10)])
        keep(connection, BATCH, [staged])
    finally:
        connection.execute("reset role")
    with pytest.raises(BatchNotFinished, match="no application has staged"):
        merge_kept(connection, BATCH)


def test_the_slower_of_two_acks_at_once_merges_nothing(connection: Connection, connect: Connect) -> None:
    """Two acks can meet because the workers of a queue do not lock each other out."""
    staged_by_an_application(connection, (1, 10))
    faster, slower = connect(autocommit=False), connect()
    merge_kept(faster, BATCH)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(merge_kept, slower, BATCH)
        until(connection, f"select {slower.info.backend_pid} in (select pid from pg_locks where not granted)")
        faster.commit()
        with pytest.raises(StaleClaim, match="was faster"):
            late.result()
    assert total(connection) == [(1, 10)]
