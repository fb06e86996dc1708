"""Detached batches in a DAG, run by ``dag.test()``."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.airflow_home import uri
from tests.dag_bags import stored
from tests.ledger import Connect, make_ledger

Connection = psycopg.Connection[Any]

DAG = """
from airflow.sdk import dag, task, task_group

from airflow_pgchange import CommitFeed, ConsumerTransaction
from airflow_pgchange.detached import Handle
from airflow_pgchange.hooks import PgChangeHook
from airflow_pgchange.operators import claimed_batch


def write(connection):
    connection.execute("insert into audit select id from worked")


@task
def work(handle):
    handle = Handle.from_text(handle)
    hook = PgChangeHook("airline")
    with ConsumerTransaction(handle.feed, hook.conninfo()) as transaction:
        transaction.resume(handle.token)
        ids = [change.id for change in transaction.changes()]
        transaction.keep_lease()
    with hook.get_conn() as connection:
        connection.execute("truncate worked")
        connection.execute("insert into worked select unnest(%s::bigint[])", [ids])
        broken = connection.execute("select exists (select from broken)").fetchone()[0]
        if broken and handle.feed.consumer != "one":
            raise ValueError("the job is broken")


@task
def behind():
    pass


@dag(dag_id="detached", schedule=None)
def plain():
    where = {"postgres_conn_id": "airline", "lease": "30 min", "write": write}
    with claimed_batch(feed=CommitFeed("audit", 0), **where) as batch:
        work(batch.handle)
    batch.group >> behind()


@dag(dag_id="mapped", schedule=None)
def mapped():
    @task
    def feeds():
        return [{"kind": "commit", "consumer": consumer, "branch": 0} for consumer in ("one", "two")]

    @task_group
    def each(feed):
        with claimed_batch(feed=feed, postgres_conn_id="airline", staged=False) as batch:
            work(batch.handle)

    each.expand(feed=feeds())


plain()
mapped()
"""


@pytest.fixture
def connection(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Connection:
    made = connect()
    make_ledger(made)
    made.execute("create table worked (id bigint); create table broken ()")
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return made


@pytest.fixture(scope="module")
def dags(metadata: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("dags")
    (folder / "detached.py").write_text(DAG)
    bag = stored(folder)
    assert bag.import_errors == {}
    return bag.dags


def ended(run: Any) -> dict[str, str]:
    """Return the states of the tasks, and of the run."""
    tasks = {ti.task_id.removeprefix("batch."): str(ti.state) for ti in run.get_task_instances()}
    return {**tasks, "run": str(run.state)}


def same(state: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(("claim", "work", "ack", "release", "behind", "run"), state), **others}


def test_a_batch_is_processed_by_other_tasks_whatever_becomes_of_them(
    dags: Any, connection: Connection
) -> None:
    """Takes seconds: Airflow runs whole DAGs."""
    dag = dags["detached"]
    assert ended(dag.test()) == same("skipped", run="success")
    connection.execute("insert into ledger select from generate_series(1, 3)")
    connection.execute("insert into broken default values")
    upstream = "upstream_failed"
    assert ended(dag.test()) == same(
        upstream, claim="success", work="failed", release="success", run="failed"
    )
    told = connection.execute("select error from pgchange.batch").fetchall()
    assert [str(error).rsplit(": ", 1)[1] for (error,) in told] == ["batch.work"]
    connection.execute("truncate broken")
    assert ended(dag.test()) == same("success", release="skipped")
    assert connection.execute("select array_agg(id order by id) from audit").fetchall() == [([1, 2, 3],)]
    assert connection.execute(
        "select attempt, acked_at is null from pgchange.batch order by 1"
    ).fetchall() == [
        (1, True),
        (2, False),
    ]


def test_a_group_of_tasks_is_mapped_over_consumers(dags: Any, connection: Connection) -> None:
    """Takes seconds: Airflow runs a whole DAG. The job of the second consumer fails."""
    connection.execute("insert into ledger select from generate_series(1, 3)")
    connection.execute("insert into broken default values")
    run = dags["mapped"].test()
    found = {(ti.task_id.rpartition(".")[2], ti.map_index): str(ti.state) for ti in run.get_task_instances()}
    of_each = {"claim": "success success", "work": "success failed", "ack": "success upstream_failed"}
    of_each["release"] = "skipped success"
    assert found == {
        ("feeds", -1): "success",
        **{
            (name, place): state for name, each in of_each.items() for place, state in enumerate(each.split())
        },
    }
    ended = "select consumer, acked_at is not null, error is not null from pgchange.batch order by 1"
    assert connection.execute(ended).fetchall() == [
        ("commits:one/0", True, False),
        ("commits:two/0", False, True),
    ]
