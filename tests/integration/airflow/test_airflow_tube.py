"""The operators of tubes, run as a worker runs them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from airflow.sdk import DAG, task

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument, Refused, Stopped, UnknownConsumer
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.operators import (
    TubeAttachOperator,
    TubeBackfillOperator,
    TubeGarbageCollectOperator,
    TubeRecomputeOperator,
    TubeTouchOperator,
)
from airflow_pgchange.tubes import Control
from tests.airflow_home import uri
from tests.tubes import controls, pods, touched

pytestmark = pytest.mark.usefixtures("few_sessions")

Connect = Callable[..., psycopg.Connection[Any]]
FEED = TubeFeed("q")
ROWS = 50
TELLING = "airflow_pgchange.operators.tube.backfill.telling"


@pytest.fixture
def conn_id(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> str:
    connect().execute(
        "create table plane (id bigint primary key, built int); create table mirror (id bigint primary key);"
        f"insert into plane select n, n % 7 from generate_series(1, {ROWS}) as n;"
        "create index on plane (built, id)"
    )
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return "airline"


@pytest.fixture
def tube(conn_id: str, connect: Connect) -> psycopg.Connection[Any]:
    run(
        TubeAttachOperator(
            task_id="attach", tube="q", tables="public.plane", shard=0, postgres_conn_id=conn_id
        )
    )
    return connect()


def run(task: Any) -> Any:
    return task.execute({})


def backfill(conn_id: str, **arguments: Any) -> TubeBackfillOperator:
    given = {"tube": "q", "tables": ["public.plane"], "order_col": "built", "chunk_size": 20, **arguments}
    return TubeBackfillOperator(task_id="backfill", postgres_conn_id=conn_id, **given)


def collect(conn_id: str, **arguments: Any) -> TubeGarbageCollectOperator:
    given = {"feed": FEED, "downstream": "public.mirror", **arguments}
    return TubeGarbageCollectOperator(task_id="collect", postgres_conn_id=conn_id, **given)


def replay(db: str) -> list[int]:
    """Process a batch into the mirror, and return its ids."""
    with ConsumerTransaction(FEED, db) as consumer:
        if consumer.claim(10_000) is None:
            return []
        ids = sorted(change.id for change in consumer.changes())
        consumer.ack(
            lambda connection: connection.execute(
                "delete from mirror where id = any (%(ids)s) and id not in (select id from plane); "
                "insert into mirror select id from plane where id = any (%(ids)s) on conflict do nothing",
                {"ids": ids},
            )
        )
    return ids


def test_attaching_twice_does_nothing(tube: psycopg.Connection[Any], conn_id: str) -> None:
    run(
        TubeAttachOperator(
            task_id="attach", tube="q", tables=["public.plane"], shard="0", postgres_conn_id=conn_id
        )
    )
    tube.execute("insert into plane values (1000, 1)")
    assert pods(tube) == [("I", 0, [1000])]


def test_a_query_fans_out_touches(tube: psycopg.Connection[Any], conn_id: str) -> None:
    task = TubeTouchOperator(
        task_id="touch",
        tube="q",
        query="select id from plane where built = {{ params.built }} order by id",
        shard="{{ params.shard }}",
        postgres_conn_id=conn_id,
    )
    task.render_template_fields({"params": {"built": 3, "shard": 0}})  # type: ignore[typeddict-item]
    run(task)
    assert touched(tube) == list(range(3, ROWS + 1, 7))


def test_a_backfill_touches_every_row_behind_what_is_touched_meanwhile(
    tube: psycopg.Connection[Any], conn_id: str
) -> None:
    assert run(backfill(conn_id)) == {"public.plane": ROWS}
    assert touched(tube) == list(range(1, ROWS + 1))
    assert {op for op, _, _ in pods(tube)} == {"B"}
    assert [payload["type"] for _, _, payload in controls(tube)] == ["backfill_start", "backfill_end"]


def test_a_backfill_that_was_killed_goes_on_at_the_same_chunk(
    tube: psycopg.Connection[Any], conn_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = backfill(conn_id)
    monkeypatch.setattr(TELLING, lambda *_: lambda _: task.on_kill())
    with pytest.raises(Stopped):
        run(task)
    assert len(touched(tube)) == 20
    run(backfill(conn_id))
    assert touched(tube) == list(range(1, ROWS + 1))


def test_a_paused_backfill_waits_until_it_is_resumed(
    tube: psycopg.Connection[Any], conn_id: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_pgchange.tubes.backfills.LOOK_AGAIN", 0.05)
    seen: list[str] = []
    task, other = backfill(conn_id), connect()

    def pause(progress: Any) -> None:
        seen.append(progress.state)
        if len(seen) == 1:
            other.execute("select tube.backfill_pause(%s)", [progress.id])
        if len(seen) == 4:
            other.execute("select tube.backfill_resume(%s)", [progress.id])

    monkeypatch.setattr(TELLING, lambda *_: pause)
    run(task)
    assert seen[:4] == ["running", "paused", "paused", "paused"]
    assert seen[-1] == "done"
    assert touched(tube) == list(range(1, ROWS + 1))


@pytest.mark.parametrize("scheduled", [False, True])
def test_each_of_several_tables_is_told_of_from_its_first_chunk_on(
    tube: psycopg.Connection[Any], conn_id: str, scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = ["public.plane", "public.other"]
    tube.execute("create table other (id bigint primary key, built int); insert into other table plane")
    tubes.attach(tube, "q", "public.other", shard=0)
    if scheduled:
        for table in tables:
            tube.execute("select tube.backfill_begin('q', %s::regclass, 'built', null, 20)", [table])
        tube.execute("select tube.tube_backfill_schedule('q', 'built', 0, 0)")
    task = collect(conn_id) if scheduled else backfill(conn_id, tables=tables)
    said = Mock()
    monkeypatch.setattr(type(task), "log", said)
    run(task)
    lines = [call.args[0] % call.args[1:] for call in said.info.call_args_list]
    assert sum("is running: 20 of about" in line for line in lines) == 2


def test_two_backfills_of_a_table_at_once_are_one(
    tube: psycopg.Connection[Any], conn_id: str, db: str
) -> None:
    """The second backfill joins the first, or fails because the first has just ended."""
    told: list[str] = []

    def work() -> None:
        try:
            run(backfill(conn_id, chunk_size=1))
        except Refused as error:
            told.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    raised: list[Any] = []
    monitor = threading.excepthook
    threading.excepthook = raised.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = monitor
    assert raised == []
    assert ["has not been replayed to its end yet" in each for each in told] in ([], [True])
    assert touched(tube) == list(range(1, ROWS + 1))
    assert [payload["type"] for _, _, payload in controls(tube)].count("backfill_end") == 1


def test_rows_that_a_backfill_did_not_write_are_deleted_downstream(
    tube: psycopg.Connection[Any], conn_id: str, db: str
) -> None:
    tube.execute("insert into mirror values (7000), (8000)")
    run(backfill(conn_id))
    assert run(collect(conn_id)) == {"controls": 1, "touched": 0, "given_up": 0}
    replay(db)
    assert run(collect(conn_id)) == {"controls": 1, "touched": 2, "given_up": 0}
    assert replay(db) == [7000, 8000]
    assert tube.execute("select array_agg(id order by id) from mirror").fetchone() == (
        list(range(1, ROWS + 1)),
    )
    assert controls(tube) == []


def test_a_truncated_table_is_forgotten_downstream(
    tube: psycopg.Connection[Any], conn_id: str, db: str
) -> None:
    tube.execute("insert into mirror select id from plane")
    tube.execute("truncate plane")
    assert run(collect(conn_id))["touched"] == ROWS
    replay(db)
    assert tube.execute("select count(*) from mirror").fetchone() == (0,)


def test_a_report_of_two_tables_is_recomputed_behind_writes_a_backfill_and_a_truncate(
    tube: psycopg.Connection[Any], conn_id: str
) -> None:
    tube.execute("create table flight (no bigint primary key, plane bigint); create index on flight (plane)")
    tube.execute("create table flown (plane bigint primary key, flights bigint)")
    tubes.attach(tube, "q", "public.flight", shard=0, group_by="plane")
    tube.execute("insert into flight values (1, 7), (2, 7), (3, 8)")
    query = """
        select p.id as plane, count(f.no) as flights from plane as p left join flight as f on f.plane = p.id
        where p.id = any(%(ids)s) group by 1
    """
    recompute = TubeRecomputeOperator(
        task_id="recompute", feed=FEED, query=query, into="flown", key="plane", postgres_conn_id=conn_id
    )
    report = {"downstream": "flown", "key": "plane"}
    assert run(recompute)["changes"] == 2
    assert tube.execute("table flown order by 1").fetchall() == [(7, 2), (8, 1)]
    run(backfill(conn_id))
    assert [run(each)["batches"] for each in (recompute, recompute)] == [1, 0]
    assert run(collect(conn_id, **report))["controls"] == 2
    assert tube.execute("select sum(flights), count(*) from flown").fetchone() == (3, ROWS)
    tube.execute("truncate flight")
    assert run(collect(conn_id, **report)) == {"controls": 1, "touched": ROWS, "given_up": 0}
    run(recompute)
    assert tube.execute("select sum(flights), count(*) from flown").fetchone() == (0, ROWS)
    assert controls(tube) == []


def test_a_callable_names_what_it_holds(tube: psycopg.Connection[Any], conn_id: str) -> None:
    asked: list[Control] = []

    def held(control: Control) -> list[int]:
        asked.append(control)
        return [1, 2, 3]

    tube.execute("truncate plane")
    assert run(collect(conn_id, downstream=held)) == {"controls": 1, "touched": 3, "given_up": 0}
    assert [(control.type, control.table, control.shard) for control in asked] == [
        ("truncate", "public.plane", 0)
    ]


def test_a_function_that_is_decorated_names_what_it_holds_with_arguments_of_its_own(
    tube: psycopg.Connection[Any], conn_id: str
) -> None:
    def held(control: Control, upto: int) -> list[int]:
        return list(range(1, upto + 1))

    tube.execute("truncate plane")
    with DAG("collecting"):
        made = task.pgchange_collect(feed=FEED, postgres_conn_id=conn_id)(held)(upto=4)
    assert run(made.operator)["touched"] == 4


def test_the_tables_of_a_tube_that_does_not_exist_are_refused_by_its_name(
    tube: psycopg.Connection[Any],
) -> None:
    assert tubes.attached(tube, "q") == ["public.plane"]
    with pytest.raises(UnknownConsumer, match="no tube nosuch"):
        tubes.attached(tube, "nosuch")


def test_a_backfill_that_was_scheduled_is_carried_out(tube: psycopg.Connection[Any], conn_id: str) -> None:
    tube.execute("select tube.tube_backfill_schedule('q', 'built', 0, 0)")
    assert run(collect(conn_id)) == {"controls": 2, "touched": ROWS, "given_up": 0}
    assert touched(tube) == list(range(1, ROWS + 1))
    assert [payload["type"] for _, _, payload in controls(tube)] == ["backfill_end"]


def test_a_pod_that_names_what_is_no_table_is_given_up_and_does_no_harm(
    tube: psycopg.Connection[Any], conn_id: str
) -> None:
    tube.execute("insert into mirror values (7000)")
    tube.execute(
        "select tube.touch('q', 0, '{}', 'T', %s)",
        [json.dumps({"type": "truncate", "tbl": "plane where true); drop table mirror; --"})],
    )
    assert run(collect(conn_id)) == {"controls": 0, "touched": 0, "given_up": 1}
    assert tube.execute("select count(*) from mirror").fetchone() == (1,)
    assert controls(tube) == []


def test_a_copy_of_several_tables_must_say_whose_a_row_is(
    tube: psycopg.Connection[Any], conn_id: str
) -> None:
    tube.execute("create table other (id bigint primary key)")
    run(
        TubeAttachOperator(
            task_id="attach", tube="q", tables="public.other", shard=1, postgres_conn_id=conn_id
        )
    )
    tube.execute("truncate plane")
    with pytest.raises(InvalidArgument, match="no column shard to tell them apart"):
        run(collect(conn_id))


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (lambda c: backfill(c, tube="nosuch"), UnknownConsumer),
        (lambda c: backfill(c, order_col="nosuch"), Refused),
        (lambda c: backfill(c, chunk_size=0), InvalidArgument),
        (lambda c: backfill(c, tables="a.b.c"), InvalidArgument),
    ],
)
def test_nonsense_is_named(
    tube: psycopg.Connection[Any], conn_id: str, task: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(task(conn_id))
    assert pods(tube) == []
