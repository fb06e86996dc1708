"""The operators of detached batches, each called as Airflow calls it: retried, cleared, busy, or without a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from airflow.exceptions import AirflowSkipException
from airflow.sdk import DAG
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_pgchange.assets.targets import target_tables
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import InvalidArgument, Leased, StaleClaim
from airflow_pgchange.operators import (
    AckBatchOperator,
    ClaimBatchOperator,
    ReleaseBatchOperator,
    claimed_batch,
)
from tests.ledger import FEED, Connect

Write = Callable[[int], None]
WHERE = {"feed": FEED, "postgres_conn_id": "airline"}


def context(
    run_id: str = "today", try_number: int = 1, states: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the context of a try of the task ``claim``, in a run whose tasks have these states."""
    ti = SimpleNamespace(
        dag_id="d",
        run_id=run_id,
        task_id="claim",
        map_index=-1,
        try_number=try_number,
        get_task_states=lambda **_: {run_id: states or {}},
    )
    return {
        "ti": ti,
        "run_id": run_id,
        "dag": SimpleNamespace(dag_id="d"),
        "outlet_events": OutletEventAccessors(),
    }


def claim(given: dict[str, Any], **arguments: Any) -> str:
    return ClaimBatchOperator(task_id="claim", **WHERE, **arguments).execute(given)  # type: ignore[arg-type]


def note(connection: psycopg.Connection[Any]) -> None:
    connection.execute("insert into audit values (1)")


def ack(handle: str, given: dict[str, Any] | None = None, **arguments: Any) -> Any:
    task = AckBatchOperator(task_id="ack", **WHERE, handle=handle, write=note, **arguments)
    return task.execute(given or context())  # type: ignore[arg-type]


def release(handle: str | None, **states: str) -> None:
    task = ReleaseBatchOperator(task_id="release", **WHERE, handle=handle)
    task.execute(context(states=states))  # type: ignore[arg-type]


def test_a_claim_that_is_tried_again_gets_its_batch_at_once_with_the_next_attempt(write: Write) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    write(3)
    first, again = (Handle.from_text(claim(context(try_number=number), on_busy="fail")) for number in (1, 2))
    assert (again.batch_id, first.attempt, again.attempt, again.count) == (first.batch_id, 1, 2, 3)


@pytest.mark.parametrize(("on_busy", "error"), [("skip", AirflowSkipException), ("fail", Leased)])
def test_a_claim_of_another_run_finds_the_consumer_busy(
    on_busy: str, error: type[Exception], write: Write
) -> None:
    write(1)
    claim(context())
    with pytest.raises(error):
        claim(context("tomorrow"), on_busy=on_busy)


def test_a_claim_of_nothing_is_skipped(conn_id: str) -> None:
    with pytest.raises(AirflowSkipException, match="nothing that is ready"):
        claim(context())


def test_an_ack_that_is_repeated_succeeds_and_writes_nothing(write: Write, connect: Connect) -> None:
    write(3)
    handle = claim(context())
    assert [ack(handle)["acked_before"] for _ in range(2)] == [False, True]
    assert connect().execute("select count(*) from audit").fetchone() == (1,)


def test_an_ack_of_an_earlier_attempt_fails_and_writes_nothing(write: Write, connect: Connect) -> None:
    write(1)
    late = claim(context())
    claim(context(try_number=2), on_busy="fail")
    with pytest.raises(StaleClaim):
        ack(late)
    assert connect().execute("select count(*) from audit").fetchone() == (0,)


def test_each_table_that_an_ack_wrote_has_an_event(write: Write) -> None:
    write(1)
    outlet, given = target_tables("audits"), context()
    ack(claim(context()), given, outlets=[outlet])
    events = given["outlet_events"][outlet].asset_alias_events
    assert [event.dest_asset_key.uri.rpartition("/")[2] for event in events] == ["audit"]


def test_a_release_names_the_tasks_that_failed_and_lets_the_batch_be_claimed(
    write: Write, connect: Connect
) -> None:
    write(1)
    release(claim(context()), **{"batch.first": "success", "batch.second": "failed"})
    ((error,),) = connect().execute("select error from pgchange.claim").fetchall()
    assert error == "tasks that failed in run today of DAG d: batch.second"
    assert Handle.from_text(claim(context("tomorrow"), on_busy="fail")).attempt == 2


def test_a_release_without_a_batch_or_after_the_ack_is_skipped(write: Write) -> None:
    with pytest.raises(AirflowSkipException, match="no batch was claimed"):
        release(None)
    write(1)
    handle = claim(context())
    ack(handle)
    with pytest.raises(AirflowSkipException, match="has ended"):
        release(handle)


def test_a_block_without_a_task_is_refused() -> None:
    with (
        DAG("d"),
        pytest.raises(InvalidArgument, match="no task that processes the batch"),
        claimed_batch(**WHERE),
    ):
        pass
