"""The batch operators, run as a worker runs them, on a real server, without a scheduler."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from airflow.providers.common.compat.sdk import AirflowSkipException
from airflow.sdk import DAG, task

from airflow_pgchange.errors import BatchGivenUp, ConsumerBusy, InvalidArgument, ServerUnavailable, Stopped
from airflow_pgchange.feeds import Batch, Change, CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.draining import SHOWN_BATCHES
from airflow_pgchange.feeds.feed_kinds import to_json
from tests.airflow_home import uri
from tests.ledger import FEED, Connect, audit, operator, run
from tests.waiting import sleeps, until

pytestmark = pytest.mark.usefixtures("few_sessions")

Database = psycopg.Connection[Any]


def count(connect: Connect, table: str = "audit") -> int:
    row = connect().execute(f"select count(*) from {table}").fetchone()
    return int(row[0]) if row else 0


def test_writes_of_a_callable_are_committed_with_the_progress(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(7)
    assert run(operator(conn_id))["changes"] == 7
    assert run(operator(conn_id))["changes"] == 0
    assert count(connect) == 7


def test_a_batch_is_noted_with_the_try_of_the_task_that_processed_it(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(1)
    ti = SimpleNamespace(
        dag_id="d", run_id="manual__2026-01-01T00:00+00/1", task_id="g.t", map_index=-1, try_number=2
    )
    operator(conn_id).execute({"ti": ti})  # type: ignore[typeddict-item]
    noted = connect().execute("select run from pgchange.batches()").fetchall()
    assert noted == [("d/manual__2026-01-01T00%3A00%2B00%2F1/g.t/-1/2",)]


def test_a_summary_is_small_plain_json(conn_id: str, write: Callable[[int], None]) -> None:
    write(SHOWN_BATCHES + 2)
    summary = run(operator(conn_id, limit=1, max_batches=None))
    assert (summary["feed"], summary["batches"], summary["changes"]) == (
        "commits:audit/0",
        *[SHOWN_BATCHES + 2] * 2,
    )
    assert len(summary["batch_ids"]) == SHOWN_BATCHES
    assert len(json.dumps(summary)) < 2000


def test_a_callable_that_fails_leaves_neither_results_nor_progress(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    def fail(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        audit(batch, changes, connection)
        raise ZeroDivisionError

    write(3)
    with pytest.raises(ZeroDivisionError):
        run(operator(conn_id, process=fail))
    assert count(connect) == 0
    run(operator(conn_id))
    assert count(connect) == 3


def test_a_callable_that_fails_between_two_changes_ends(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    def fail(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        next(changes)
        raise ZeroDivisionError

    write(3)
    with pytest.raises(ZeroDivisionError):
        run(operator(conn_id, process=fail))
    run(operator(conn_id))
    assert count(connect) == 3


async def audit_later(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
    audit(batch, changes, connection)


def audit_lazily(batch: Batch, changes: Iterator[Change], connection: Database) -> Iterator[None]:
    yield audit(batch, changes, connection)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("process", [audit_later, audit_lazily])
def test_a_callable_that_returns_its_work_undone_loses_nothing(
    conn_id: str, connect: Connect, write: Callable[[int], None], process: Any
) -> None:
    write(3)
    for made in (operator(conn_id, process=process), decorated(process, conn_id)):
        with pytest.raises(InvalidArgument, match="nothing was processed"):
            run(made)
    run(operator(conn_id))
    assert count(connect) == 3


def test_a_batch_that_is_tried_again_has_the_same_id_and_the_same_changes(
    conn_id: str, write: Callable[[int], None]
) -> None:
    seen: list[tuple[str, int, list[int]]] = []

    def fail_once(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        seen.append((batch.id, batch.attempt, [change.id for change in changes]))
        if len(seen) == 1:
            raise ZeroDivisionError

    write(3)
    with pytest.raises(ZeroDivisionError):
        run(operator(conn_id, process=fail_once))
    write(3)
    run(operator(conn_id, process=fail_once))
    first, second = seen
    assert (first[0], first[2]) == (second[0], second[2])
    assert (first[1], second[1]) == (1, 2)


YEARLY = CommitFeed("yearly audit", 0)
GIVE_UP = "airflow-pgchange skip 'commits:yearly audit/0' --postgres-conn-id airline"


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_the_error_of_a_batch_begins_with_its_cause_and_has_no_secrets(
    conn_id: str, write: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(1)
    with pytest.raises(ValueError, match="no row 7"):
        run(operator(conn_id, process=failing(ValueError("no row 7, password=s3cret")), feed=YEARLY))
    said = capsys.readouterr().out
    told = said.index("ValueError: no row 7, password=***")
    assert told < said.index("attempt 1 on batch")
    assert "s3cret" not in said


@pytest.mark.parametrize(("max_attempts", "often"), [(None, 3), (2, 2)])
def test_giving_a_batch_up_is_offered_once_it_has_failed_often(
    conn_id: str,
    write: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    max_attempts: int | None,
    often: int,
) -> None:
    write(1)
    offered = []
    for _ in range(often):
        with pytest.raises(ZeroDivisionError):
            run(
                operator(
                    conn_id,
                    process=failing(ZeroDivisionError()),
                    feed=YEARLY,
                    max_attempts=max_attempts,
                    on_give_up="fail",
                )
            )
        offered.append(GIVE_UP in capsys.readouterr().out)
    assert offered == [False] * (often - 1) + [True]


@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("gone"), ServerUnavailable("gone"), OSError("disk full")]
)
def test_giving_a_batch_up_is_not_offered_for_what_is_not_its_fault(
    conn_id: str, write: Callable[[int], None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    write(1)
    for _ in range(4):
        with pytest.raises(type(error)):
            run(operator(conn_id, process=failing(error), feed=YEARLY))
    said = capsys.readouterr().out
    assert "attempt 4 on batch" in said
    assert "pgchange skip" not in said


def test_a_batch_that_failed_as_often_as_it_may_is_not_tried_again(
    conn_id: str, write: Callable[[int], None]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    write(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(operator(conn_id, process=fail, max_attempts=2, on_give_up="fail"))
    with pytest.raises(BatchGivenUp, match=r"failed, at attempt 2.*airflow-pgchange skip"):
        run(operator(conn_id, max_attempts=2, on_give_up="fail"))


def test_a_run_processes_at_most_max_batches(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(10)
    assert run(operator(conn_id, limit=3, max_batches=2))["batches"] == 2
    assert count(connect) == 6


def test_a_drain_ends_when_nothing_is_ready(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(10)
    assert run(operator(conn_id, limit=3, max_batches=None))["batches"] == 4
    assert count(connect) == 10


def test_nothing_ready_is_a_success_with_zero_batches(conn_id: str) -> None:
    assert run(operator(conn_id))["batches"] == 0


def test_nothing_ready_can_skip_the_task(conn_id: str) -> None:
    with pytest.raises(AirflowSkipException, match="nothing is ready"):
        run(operator(conn_id, skip_if_empty=True))


@pytest.fixture
def at_work(conn_id: str, db: str, write: Callable[[int], None]) -> Iterator[ConsumerTransaction]:
    """Lock the consumer, as another run that works on the feed."""
    write(2)
    with ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        yield transaction
        if not transaction._acked:
            transaction.ack()


def test_a_busy_consumer_can_skip_the_task(conn_id: str, at_work: ConsumerTransaction) -> None:
    with pytest.raises(AirflowSkipException, match="at work"):
        run(operator(conn_id, on_busy="skip"))


def test_a_busy_consumer_can_fail_the_task(conn_id: str, at_work: ConsumerTransaction) -> None:
    with pytest.raises(ConsumerBusy):
        run(operator(conn_id, on_busy="fail"))


def test_a_wait_for_a_busy_consumer_can_end(conn_id: str, at_work: ConsumerTransaction) -> None:
    with pytest.raises(ConsumerBusy):
        run(operator(conn_id, on_busy="wait", busy_timeout=0.2))


def test_overlapping_runs_wait_for_each_other_and_process_each_change_once(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(40)
    summaries: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: summaries.append(run(operator(conn_id, limit=5, max_batches=2))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(summary["changes"] for summary in summaries) == 40
    assert count(connect) == 40


def test_a_task_with_time_left_serves_what_comes_meanwhile_and_ends_when_its_time_is_over(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    later = threading.Timer(0.7, write, [3])
    later.start()
    summary = run(operator(conn_id, max_batches=None, until=2))
    later.join()
    assert (summary["changes"], count(connect)) == (3, 3)
    assert 2 <= summary["seconds"] < 30


def test_a_task_with_time_left_ends_with_the_last_of_its_batches(
    conn_id: str, write: Callable[[int], None]
) -> None:
    write(5)
    assert run(operator(conn_id, limit=1, max_batches=2, until="1 h"))["batches"] == 2


@pytest.mark.parametrize("until", ["empty", "1 h"])
def test_a_task_serves_what_comes_until_nothing_has_come_for_its_idle_time(
    conn_id: str, write: Callable[[int], None], until: str
) -> None:
    later = threading.Timer(0.7, write, [3])
    later.start()
    summary = run(operator(conn_id, max_batches=None, until=until, idle_timeout=1.5))
    later.join()
    assert summary["changes"] == 3
    assert 0.7 + 1.5 <= summary["seconds"] < 60


def test_the_wait_for_another_who_is_at_work_is_no_idle_time(
    conn_id: str, db: str, write: Callable[[int], None]
) -> None:
    began, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with ConsumerTransaction(FEED, db):
            began.set()
            ended.wait()

    def end() -> None:
        ended.set()
        time.sleep(0.5)
        write(3)

    holder, ender = threading.Thread(target=hold), threading.Timer(4, end)
    holder.start()
    began.wait()
    ender.start()
    summary = run(operator(conn_id, max_batches=None, idle_timeout=3))
    holder.join()
    ender.join()
    assert summary["changes"] == 3


def test_a_task_whose_time_is_over_finishes_its_batch_and_begins_no_other(
    conn_id: str, write: Callable[[int], None]
) -> None:
    write(5)
    assert run(operator(conn_id, limit=1, max_batches=None, until=0.000001))["batches"] == 1


def test_a_task_that_is_killed_while_it_waits_for_a_batch_ends(conn_id: str) -> None:
    task = operator(conn_id, until="1 h")
    killer = threading.Timer(0.3, task.on_kill)
    killer.start()
    with pytest.raises(Stopped, match="stopped while waiting for a batch"):
        run(task)
    killer.join()


def test_results_may_lie_in_another_database_than_the_changes(
    conn_id: str,
    other_db: str,
    connect_to: Connect,
    write: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = connect_to(other_db)
    results.execute("create table audit (id bigint primary key, batch uuid)")
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", uri(other_db))
    write(5)
    run(operator("warehouse", source_conn_id=conn_id))
    assert results.execute("select count(*) from audit").fetchone() == (5,)


@pytest.mark.parametrize("feed", [to_json(FEED), json.dumps(to_json(FEED)), {**to_json(FEED), "branch": "0"}])
def test_a_feed_can_be_given_as_json(conn_id: str, write: Callable[[int], None], feed: Any) -> None:
    write(2)
    assert run(operator(conn_id, feed=feed))["changes"] == 2


def test_a_feed_is_a_template(conn_id: str) -> None:
    task = operator(conn_id, feed={"kind": "commit", "consumer": "{{ params.who }}", "branch": 0})
    task.render_template_fields({"params": {"who": "audit"}})  # type: ignore[typeddict-item]
    assert run(task)["feed"] == "commits:audit/0"


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"max_batches": 0}, {"until": 0}, {"on_busy": "shout"}])
def test_arguments_that_make_no_sense_are_refused(conn_id: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        run(operator(conn_id, **arguments))


def test_a_killed_task_keeps_nothing_of_its_batch(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    def killed(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        audit(batch, changes, connection)
        killer.start()
        connection.execute("select pg_sleep(60)")

    def kill() -> None:
        until(connect(), sleeps())
        task.on_kill()

    write(3)
    task = operator(conn_id, process=killed)
    killer = threading.Thread(target=kill)
    with pytest.raises(Stopped, match="killed") as caught:
        run(task)
    killer.join()
    assert isinstance(caught.value.__cause__, psycopg.errors.QueryCanceled)
    assert count(connect) == 0


def test_a_task_that_is_killed_while_it_computes_does_not_commit(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    def killed(batch: Batch, changes: Iterator[Change], connection: Database) -> None:
        audit(batch, changes, connection)
        task.on_kill()

    write(3)
    task = operator(conn_id, process=killed)
    with pytest.raises(Stopped, match="killed"):
        run(task)
    assert count(connect) == 0


def test_a_committed_batch_stays_so_where_its_lag_cannot_be_reported(
    conn_id: str, connect: Connect, write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise psycopg.OperationalError("the server is gone")

    write(3)
    monkeypatch.setattr("airflow_pgchange.utils.metrics.are_on", lambda: True)
    monkeypatch.setattr("airflow_pgchange.operators.feed.lag", gone)
    assert run(operator(conn_id))["changes"] == 3
    assert count(connect) == 3


@pytest.mark.parametrize(
    "argument", [{"limit": 0}, {"limit": "some"}, {"limit": 2**31}, {"max_attempts": 0}, {"on_busy": "sleep"}]
)
def test_nonsense_is_refused_where_the_dag_is_written(conn_id: str, argument: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        operator(conn_id, **argument)


def decorated(function: Callable[..., object], conn_id: str, *args: Any, **kwargs: Any) -> Any:
    with DAG("decorated"):
        made = task.pgchange_batch(feed=FEED, postgres_conn_id=conn_id)(function)(*args, **kwargs)
    return made.operator


def test_a_decorated_function_gets_the_batch_its_changes_and_the_connection(
    conn_id: str, connect: Connect, write: Callable[[int], None]
) -> None:
    write(4)
    assert run(decorated(audit, conn_id))["changes"] == 4
    assert count(connect) == 4


def test_a_decorated_function_takes_only_what_it_names(conn_id: str, write: Callable[[int], None]) -> None:
    seen: list[int] = []

    def keep(changes: Iterator[Change], least: int, *, most: int = 10) -> None:
        seen.extend(change.id for change in changes if least <= change.id <= most)

    write(4)
    run(decorated(keep, conn_id, 2, most=3))
    assert seen == [2, 3]


def test_a_decorated_function_may_read_airflows_context(conn_id: str, write: Callable[[int], None]) -> None:
    seen: list[object] = []

    def keep(batch: Batch, ds: str | None = None) -> None:
        seen.append(ds)

    write(1)
    decorated(keep, conn_id).execute({"ds": "2013-01-01"})
    assert seen == ["2013-01-01"]


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((1,), {"least": 1}), ((), {"batch": 1})])
def test_an_argument_that_a_decorated_function_has_no_place_for_is_refused(
    args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    def keep(batch: Batch, least: int, *rest: int) -> None: ...

    with pytest.raises(TypeError):
        decorated(keep, "airline", *args, **kwargs)
