"""Arguments of the operators of tubes, as Airflow renders them or with typing errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument, SchemaMissing, Stopped
from airflow_pgchange.feeds import TubeFeed
from airflow_pgchange.operators import (
    TubeAttachOperator,
    TubeBackfillOperator,
    TubeGarbageCollectOperator,
    TubeTouchOperator,
)
from tests.airflow_home import uri
from tests.tubes import attach, faults, make, touched
from tests.waiting import sleeps, until

Connect = Callable[..., psycopg.Connection[Any]]


def make_planes(connection: psycopg.Connection[Any]) -> None:
    """Two planes in a table that is attached to tube q."""
    connection.execute(
        "create table plane (id bigint primary key, built int); insert into plane values (1, 1), (2, 2)"
    )
    make(connection)
    attach(connection, "plane")


@pytest.fixture
def tube(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> psycopg.Connection[Any]:
    connection = connect()
    make_planes(connection)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return connection


@pytest.fixture(scope="module")
def planes(shared: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    make_planes(shared)
    return shared


def everything(connection: psycopg.Connection[Any]) -> list[Any]:
    """Return the pods of tube q, the tubes, their attachments and the backfills."""
    query = "select (select json_agg(t) from q as t), (select json_agg(t) from tube.tube as t), "
    query += "(select json_agg(t) from tube.attachment as t), (select json_agg(t) from tube.backfill as t)"
    return connection.execute(query).fetchall()


@pytest.fixture
def unchanged(
    planes: psycopg.Connection[Any], shared_db: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Check that a refused operator changes nothing in tube q of the database that the module shares."""
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(shared_db))
    before = everything(planes)
    yield
    assert everything(planes) == before


def task(kind: Any, **given: Any) -> Any:
    return kind(task_id="task", postgres_conn_id="airline", **given)


def touch(**given: Any) -> Any:
    return task(TubeTouchOperator, **{"tube": "q", "query": "select 1", "shard": 0, **given}).execute({})


def backfill(**given: Any) -> TubeBackfillOperator:
    return task(TubeBackfillOperator, **{"tube": "q", "tables": ["public.plane"], "order_col": "id", **given})


def attaching(**given: Any) -> Any:
    return task(TubeAttachOperator, **{"tube": "q", "tables": ["public.plane"], **given}).execute({})


def test_a_query_may_end_as_people_end_theirs(tube: psycopg.Connection[Any]) -> None:
    for query in (
        "select 1;",
        "select 2 -- two",
        "select 3 ;\n ",
        "select 4;\r\n",
        "select 5 -- five;",
        "values (6)",
    ):
        touch(query=query)
    assert touched(tube) == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("shard", [None, "", "abc", "1.5"])
def test_a_touch_is_of_a_shard_that_somebody_named(shard: Any) -> None:
    with pytest.raises(InvalidArgument, match="shard"):
        touch(shard=shard)


def test_a_touch_without_a_shard_does_not_become_a_task() -> None:
    with pytest.raises(Exception, match="shard"):
        task(TubeTouchOperator, tube="q", query="select 1")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("named", ["", [], [""], " , ", None])
def test_an_empty_name_is_refused(named: Any) -> None:
    for run in (
        lambda: touch(tube=named),
        lambda: backfill(tables=named).execute({}),
        lambda: attaching(tables=named),
    ):
        with pytest.raises(InvalidArgument, match="name at least one"):
            run()


def test_a_tube_with_a_comma_in_its_name_is_not_taken_for_two(tube: psycopg.Connection[Any]) -> None:
    make(tube, "r")
    with pytest.raises(InvalidArgument, match="comma"):
        touch(tube=["q,r"])
    with pytest.raises(InvalidArgument, match="at least one tube"):
        tubes.touch(tube, [], "select 1", 0)
    touch(tube="q, r")
    assert (touched(tube), touched(tube, "r")) == ([1], [1])


def test_a_table_in_a_list_may_be_called_anything(tube: psycopg.Connection[Any]) -> None:
    known = set(tubes.attached(tube, "q"))
    for number, table in enumerate(("with,comma", "with.dot", "Upper", "blank "), 5):
        tube.execute(
            f'create table "{table}" (id bigint primary key); insert into "{table}" values ({number})'
        )
        attaching(tables=[f'public."{table}"'], shard="0")
        (name,) = set(tubes.attached(tube, "q")) - known
        known.add(name)
        assert backfill(tables=[name]).execute({}) == {name: 1}, table
    assert touched(tube) == [5, 6, 7, 8]


@pytest.mark.parametrize("order_col", [None, ""])
def test_a_backfill_without_a_column_goes_by_the_ids(
    tube: psycopg.Connection[Any], order_col: str | None
) -> None:
    assert list(backfill(order_col=order_col).execute({}).values()) == [2]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("table", ["public.nowhere", "nowhere.plane"])
def test_a_table_that_is_not_there_is_told(table: str) -> None:
    for run in (lambda: backfill(tables=[table]).execute({}), lambda: attaching(tables=[table])):
        with pytest.raises(InvalidArgument, match=f"there is no table {table}"):
            run()


def test_a_chunk_is_as_large_as_a_form_says(tube: psycopg.Connection[Any]) -> None:
    for number, chunk_size in enumerate((2, "3", "4.0", 5.0)):
        tube.execute(f"create table plane_{number} (like plane including all)")
        attach(tube, f"plane_{number}")
        backfill(tables=[f"public.plane_{number}"], chunk_size=chunk_size).execute({})
    sizes = tube.execute("select chunk_size from tube.backfill order by id").fetchall()
    assert sizes == [(2,), (3,), (4,), (5,)]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_size": "2.5"},
        {"chunk_size": ""},
        {"chunk_size": "many"},
        {"pause": -1},
        {"pause": "nan"},
        {"pause": "x"},
        {"pause": 1e30},
        {"shard": "abc"},
        {"shard": 3_000_000_000},
        {"chunk_size": 10_000_000_000},
        {"timeout": "inf"},
        {"timeout": -1},
        {"timeout": None},
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_any_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        backfill(**wrong).execute({})


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("query", [None, "", ";"])
def test_a_touch_by_no_query_is_refused(query: Any) -> None:
    with pytest.raises(InvalidArgument, match="query"):
        touch(query=query)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "wrong", [{"busy_timeout": "x"}, {"backfill_timeout": -1}, {"downstream": 5}, {"downstream": None}]
)
def test_what_a_worker_cannot_work_off_with_is_refused(wrong: dict[str, Any]) -> None:
    given = {"feed": TubeFeed("q"), "downstream": "public.plane", **wrong}
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        task(TubeGarbageCollectOperator, **given).execute({})


def test_as_many_workers_share_a_tube_as_a_template_says(tube: psycopg.Connection[Any]) -> None:
    attaching(workers="3")
    assert tube.execute("select partitions from tube.tube").fetchone() == (3,)
    with pytest.raises(InvalidArgument, match="workers"):
        attaching(workers="four")


def test_tables_are_attached_in_one_order_however_they_are_written(
    tube: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached tables come before others in the order of the locks, so each spelling gets its own tubes."""
    tube.execute("create table airport (id bigint primary key); create table wing (id bigint primary key)")
    attach_one, order = tubes.attach, list[str]()

    def attach_noted(connection: Any, name: str, table: str, **more: Any) -> None:
        order.append(table)
        attach_one(connection, name, table, **more)

    monkeypatch.setattr(tubes, "attach", attach_noted)
    spellings = ("public.plane", "plane", '"public"."plane"', '"plane"', 'public."plane"')
    for number, plane in enumerate(spellings):
        make(tube, f"old_{number}")
        attach(tube, "plane", f"old_{number}")
        order.clear()
        attaching(tables=["public.airport", plane], shard=0, tube=f"old_{number}")
        attaching(tables=["public.wing", plane, "public.airport"], shard=0, tube=f"new_{number}")
        assert order == [plane, "public.airport", "public.airport", plane, "public.wing"], plane


def test_tables_are_attached_all_or_none(tube: psycopg.Connection[Any]) -> None:
    with pytest.raises(Exception, match="nope"):
        attaching(tube="new", tables=["public.plane", "public.nope"], shard=0)
    assert tube.execute("select count(*) from tube.tube where name = 'new'").fetchone() == (0,)


def test_a_killed_backfill_does_not_wait_for_writers_any_longer(
    tube: psycopg.Connection[Any], connect: Connect
) -> None:
    writer = connect(autocommit=False)
    writer.execute("update plane set built = 3")
    running = backfill(timeout=3600)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(running.execute, {})
        try:
            until(tube, sleeps("^select .*tube.backfill_chunk"))
        finally:
            running.on_kill()
        with pytest.raises(Stopped):
            ended.result(30)
    writer.rollback()
    assert touched(tube) == []


def test_a_backfill_that_is_killed_before_its_first_statement_touches_nothing(
    tube: psycopg.Connection[Any],
) -> None:
    running = backfill()
    running.on_kill()
    with pytest.raises(Stopped):
        running.execute({})
    assert touched(tube) == []


def test_an_invalid_template_of_a_copys_name_is_refused(tube: psycopg.Connection[Any]) -> None:
    tube.execute("truncate plane")
    collect = task(TubeGarbageCollectOperator, feed=TubeFeed("q"), downstream="{nope}.{table}")
    with pytest.raises(InvalidArgument, match="only {tube} and {table}"):
        collect.execute({})
    assert faults(tube) == []


def test_the_tubes_that_are_ready_are_asked_of_a_database_that_has_them(
    bare_db: str, connect_to: Callable[..., psycopg.Connection[Any]]
) -> None:
    with pytest.raises(SchemaMissing, match="airflow-pgchange install"):
        tubes.ready(connect_to(bare_db))
