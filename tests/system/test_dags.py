"""The examples of ``dags/``, each run by ``dag.test()``."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.sdk.exceptions import ParamValidationError

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, TopologyFeed
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg.file_names import FileId
from airflow_pgchange.utils.compat import dag_serialization
from tests import queues
from tests.airflow_home import DAGS, uri
from tests.conftest import Role
from tests.dag_bags import bag_of, stored
from tests.lakes import TABLE, Lake
from tests.readme import Guide, blocks, track_payments
from tests.topology import make_catalogue

Connect = Callable[..., psycopg.Connection[Any]]
Example = Callable[[str], Any]

AIRLINE = """
create table movement (
    id bigint generated always as identity primary key, kind text not null, flight_date date not null,
    carrier text not null, flight integer not null, origin text not null, dest text not null,
    at timestamptz not null, delay integer
);
create table route_delay (
    carrier text, origin text, dest text, departures bigint not null, arrivals bigint not null,
    cancellations bigint not null, departure_delay bigint not null, arrival_delay bigint not null,
    primary key (carrier, origin, dest)
);
create table movement_audit (movement_id bigint primary key, batch_id uuid, committed_at timestamptz);
select revision.track('movement', branch_id => '0');
insert into movement (kind, flight_date, carrier, flight, origin, dest, at, delay) values
    ('departure', '2013-01-01', 'UA', 1, 'EWR', 'IAH', '2013-01-01 05:17', 2),
    ('arrival', '2013-01-01', 'UA', 1, 'EWR', 'IAH', '2013-01-01 08:30', 11),
    ('departure', '2013-01-01', 'UA', 2, 'EWR', 'IAH', '2013-01-01 09:00', -4),
    ('cancellation', '2013-01-01', 'AA', 3, 'JFK', 'MIA', '2013-01-01 10:00', null);
"""

TOURS = """
create table tour (id bigint primary key, state text not null);
create table offer (what text primary key, free integer not null);
create table booking (tour_id bigint, what text, primary key (tour_id, what));
insert into tour values (7, 'wanted');
insert into offer select what, 1 from unnest(
    '{room, flight_there, flight_back, transfer_to_hotel, transfer_from_hotel}'::text[]) as what;
"""

REPORT = """
create table public.flight (flight_id bigint primary key, carrier text not null);
create table public.ticket (ticket_id bigint primary key, flight_id bigint not null, cents bigint not null);
create index on public.ticket (flight_id);
create table public.flight_revenue (
    flight_id bigint primary key, carrier text not null, tickets bigint not null, cents numeric not null
);
select tube.tube_ensure_exists('flight_sales');
select tube.tube_table_ensure_attached('flight_sales', 'public.flight', shard => 0);
select tube.tube_table_ensure_attached('flight_sales', 'public.ticket', shard => 0, group_by => '{flight_id}');
insert into public.flight values (1, 'UA'), (2, 'AA');
insert into public.ticket values (11, 1, 300), (12, 1, 400);
"""


@pytest.fixture
def airline(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> psycopg.Connection[Any]:
    """A database with four movements, and Airflow's connection to it."""
    connection = connect()
    connection.execute(AIRLINE)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return connection


def states(run: Any) -> dict[str, str]:
    return {ti.task_id: str(ti.state) for ti in run.get_task_instances()}


def test_the_examples_import_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an example opens a connection while it is imported")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(psycopg.Connection, "connect", refuse)
    bag = bag_of(DAGS)
    assert bag.import_errors == {}
    assert set(bag.dags) == {
        "flight_delays",
        "movement_audit",
        "movements_in_lake",
        "delay_report",
        "pgchange_lake_maintenance",
        "pgchange_maintenance",
        "tube_replay",
        "tube_report",
        "tube_backfill",
        "event_handlers",
        "tour_booking",
        "tour_handlers",
        "topology_masters",
    }


def test_an_example_is_imported_by_one_line_as_often_as_airflow_looks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(blocks("python", "docs/how-to/airflow.md")[-2])
    for _ in range(2):
        bag = bag_of(tmp_path)
        assert (bag.import_errors, list(bag.dags)) == ({}, ["pgchange_maintenance"])
        assert bag.dags["pgchange_maintenance"].fileloc == str(tmp_path / "mine.py")


def test_an_example_is_made_for_the_connections_that_a_file_names(tmp_path: Path) -> None:
    """The triggerer of the examples' connections is not used, because their team has none."""
    (tmp_path / "mine.py").write_text(blocks("python", "docs/how-to/airflow.md")[-1])
    bag = bag_of(tmp_path)
    assert (bag.import_errors, set(bag.dags)) == ({}, {"pgchange_maintenance", "shop_copies"})
    params = bag.dags["pgchange_maintenance"].params
    assert (params["databases"], params["retention"]) == (["shop", "warehouse"], "30 days")
    replay: Any = bag.dags["shop_copies"].get_task("worker.replay")
    assert (replay.postgres_conn_id, replay._conn_id) == ("shop", "spark_connect")


EXAMPLES: dict[str, dict[str, Any]] = {
    "delay_report": {},
    "event_handlers": {},
    "flight_delays": {"spark_conn_id": "sparks"},
    "movement_audit": {},
    "movements_in_lake": {"spark_conn_id": "sparks"},
    "pgchange_lake_maintenance": {},
    "pgchange_maintenance": {"databases": ["mine"]},
    "topology_masters": {},
    "tour_booking": {},
    "tube_backfill": {},
    "tube_report": {},
    "tube_replay": {"spark_conn_id": "sparks"},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_names_only_the_connections_that_it_is_given(name: str) -> None:
    module = import_module(f"airflow_pgchange.example_dags.{name}")
    given = (
        EXAMPLES[name] if "databases" in EXAMPLES[name] else {**EXAMPLES[name], "postgres_conn_id": "mine"}
    )
    made = [getattr(module, name)("mine", **given)]
    if name == "tour_booking":
        made.append(module.tour_handlers("mine", **given))
    for dag in made:
        dag.doc_md = None
        stored = json.dumps(dag_serialization().to_dict(dag))
        assert dag.dag_id == "mine"
        assert re.findall(r'["/](?:airline|catalogue|spark_default)["/]', stored) == []
    source = Path(str(module.__file__)).read_text().replace(str(module.__doc__), "")
    named = [line.strip() for line in source.splitlines() if re.search("airline|catalogue", line)]
    assert all(
        "conn_id: str =" in line or "variable" in line.lower() or "without it" in line for line in named
    )


@pytest.mark.usefixtures("metadata")
def test_the_whole_task_of_the_guide_to_testing(
    db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Takes seconds: Airflow runs a whole DAG."""
    connection = connect()
    track_payments(connection)
    monkeypatch.setenv("TEST_DATABASE", db)
    monkeypatch.setenv("TEST_DATABASE_URI", uri(db))
    (tmp_path / "balances.py").write_text(blocks("python", "docs/how-to/testing.md")[0])
    bag = stored(tmp_path)
    guide = Guide("docs/how-to/testing.md", "unused", connection)
    guide.names["fixture"] = contextmanager
    for section in (
        "A batch without a server",
        "Results on a real server",
        "The whole task on a real server",
    ):
        guide.run(section, [("@pytest.fixture\n", "@fixture\n")])
    guide.names["balances"] = bag.dags["balances"]
    with guide.names["whole_shop"](monkeypatch) as shop:
        guide.names["test_the_dag_adds_what_was_paid"](shop)


def test_every_example_has_the_name_of_its_dag() -> None:
    for dag_id, dag in bag_of(DAGS).dags.items():
        module = import_module(f"airflow_pgchange.example_dags.{Path(dag.fileloc).stem}")
        assert vars(module)[f"{dag_id}_dag"].dag_id == dag_id


def test_the_demo_has_those_that_run_there() -> None:
    bag = bag_of(DAGS.parent / "demo" / "dags")
    assert bag.import_errors == {}
    assert set(bag.dags) == {
        "delay_report",
        "flight_delays",
        "movement_audit",
        "movements_in_lake",
        "pgchange_maintenance",
        "tube_backfill",
        "tube_replay",
    }


@pytest.mark.usefixtures("connect_server")
def test_flight_delays_adds_each_movement_once(example: Example, airline: psycopg.Connection[Any]) -> None:
    """Takes seconds: Airflow runs a whole DAG, and a Spark server may have to start."""
    for _ in range(2):
        assert states(example("flight_delays").test()) == {"aggregate": "success"}
    rows = airline.execute("select * from route_delay order by carrier").fetchall()
    assert rows == [("AA", "JFK", "MIA", 0, 0, 1, 0, 0), ("UA", "EWR", "IAH", 2, 1, 0, -2, 11)]


def test_movement_audit_notes_each_movement_once(example: Example, airline: psycopg.Connection[Any]) -> None:
    """Takes seconds: a run of a whole DAG by Airflow."""
    for _ in range(2):
        assert states(example("movement_audit").test()) == {"keep": "success"}
    assert airline.execute("select count(*), count(distinct batch_id) from movement_audit").fetchone() == (
        4,
        1,
    )


def test_delay_report_waits_for_the_consumer_and_then_reads(
    example: Example, airline: psycopg.Connection[Any], db: str
) -> None:
    """Takes seconds: a run of a whole DAG by Airflow, while its consumer works in a JVM."""
    with ConsumerTransaction(CommitFeed("route_delay", 0), db) as transaction:
        transaction.claim(100)
        transaction.ack(
            lambda connection: (
                connection.execute("insert into route_delay values ('UA', 'EWR', 'IAH', 2, 1, 0, -2, 11)")
                and None
            )
        )
    run = example("delay_report").test()
    assert states(run) == {"up_to_date": "success", "worst_routes": "success"}


def test_maintenance_looks_after_the_databases_that_the_variable_names(
    example: Example, airline: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds: a run of a whole DAG by Airflow, with a mapped task for each database."""
    monkeypatch.setenv("AIRFLOW_VAR_PGCHANGE_DATABASES", '["airline", "airline"]')
    run = example("pgchange_maintenance").test()
    found = sorted((ti.task_id, ti.map_index, str(ti.state)) for ti in run.get_task_instances())
    assert found == [("databases", -1, "success"), ("maintain", 0, "success"), ("maintain", 1, "success")]


@pytest.mark.hstore
def test_maintenance_looks_after_the_databases_that_a_person_names(
    example: Example, airline: psycopg.Connection[Any]
) -> None:
    airline.execute(
        "insert into mbus.saga (name, state, changed_at) "
        "values ('old', 'complete', now() - interval '31 days'), ('young', 'complete', now())"
    )
    run = example("pgchange_maintenance").test(run_conf={"databases": ["airline"], "keep": "30 days"})
    assert states(run) == {"databases": "success", "maintain": "success"}
    assert airline.execute("select name from mbus.saga").fetchall() == [("young",)]


def test_maintenance_of_a_lake_removes_the_files_that_an_attempt_has_left(
    example: Example, airline: psycopg.Connection[Any], db: str, tmp_path: Path
) -> None:
    """Takes seconds: a run of a whole DAG by Airflow."""
    table = Lake(db, tmp_path).table()
    young, old = (
        tmp_path / "sales/payment/data" / f"{number}-{FileId(Attempt('a', 1), table.metadata)}.parquet"
        for number in range(2)
    )
    young.parent.mkdir()
    for file in (young, old):
        file.write_text("rows")
    os.utime(old, (0, 0))
    run = example("pgchange_lake_maintenance").test(run_conf={"tables": [str(TABLE)]})
    assert states(run) == {"tables": "success", "maintain": "success"}
    (done,) = (ti.xcom_pull("maintain", map_indexes=[0])[0] for ti in run.get_task_instances()[:1])
    assert (done["table"], done["files"], done["bytes"], done["expired"]) == ("lake.sales.payment", 1, 4, 0)
    assert (young.exists(), old.exists()) == (True, False)


@pytest.fixture
def planes(airline: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """A table with two planes, a tube that it touches, and the schema of the tube's copies."""
    airline.execute(
        "create table public.plane (id bigint primary key, tail text); insert into plane values (1, 'N1'), (2, 'N2');"
        "create schema copies; create table copies.plane (id bigint primary key, tail text);"
        "select tube.tube_ensure_exists('copies'); select tube.tube_table_ensure_attached('copies', 'plane', 0)"
    )
    return airline


def copy_of(planes: psycopg.Connection[Any]) -> list[tuple[int, str]]:
    return planes.execute("select * from copies.plane order by id").fetchall()


@pytest.mark.usefixtures("connect_server")
def test_tube_replay_mirrors_what_was_touched(example: Example, planes: psycopg.Connection[Any]) -> None:
    """Takes seconds: Airflow runs a whole DAG, and a Spark server may have to start."""
    planes.execute("insert into plane values (3, 'N3'); delete from plane where id = 2")
    run = example("tube_replay").test()
    assert set(states(run).values()) == {"success"}
    assert copy_of(planes) == [(3, "N3")]


@pytest.mark.usefixtures("connect_server")
def test_tube_replay_works_on_every_tube_that_has_something_to_do(
    example: Example, planes: psycopg.Connection[Any]
) -> None:
    """Takes seconds: Airflow runs a whole DAG, and a Spark server may have to start."""
    planes.execute(
        "create schema later; create table later.plane (id bigint primary key, tail text);"
        "select tube.tube_ensure_exists('later'); select tube.tube_table_ensure_attached('later', 'plane', 0);"
        "select tube.tube_ensure_exists('idle'); insert into plane values (3, 'N3')"
    )
    run = example("tube_replay").test()
    replayed = [ti.map_index for ti in run.get_task_instances() if ti.task_id == "worker.replay"]
    assert sorted(replayed) == [0, 1]
    assert planes.execute("select * from later.plane").fetchall() == copy_of(planes) == [(3, "N3")]


def test_tube_report_computes_the_flights_whose_tickets_or_rows_have_changed(
    example: Example, airline: psycopg.Connection[Any]
) -> None:
    """Takes seconds: Airflow runs a whole DAG twice."""
    airline.execute(REPORT)
    assert set(states(example("tube_report").test()).values()) == {"success"}
    report = "select flight_id, carrier, tickets, cents from public.flight_revenue order by 1"
    assert airline.execute(report).fetchall() == [(1, "UA", 2, 700), (2, "AA", 0, 0)]
    airline.execute(
        "update public.flight set carrier = 'DL' where flight_id = 2;"
        "insert into public.ticket values (13, 2, 90); delete from public.flight where flight_id = 1"
    )
    assert set(states(example("tube_report").test()).values()) == {"success"}
    assert airline.execute(report).fetchall() == [(2, "DL", 1, 90)]


@pytest.mark.usefixtures("connect_server")
def test_a_backfill_from_the_form_makes_the_copy_whole_and_gives_up_what_is_gone(
    example: Example, planes: psycopg.Connection[Any]
) -> None:
    """Takes seconds: Airflow runs two whole DAGs, and a Spark server may have to start."""
    planes.execute("insert into copies.plane values (99, 'gone')")
    run = example("tube_backfill").test(
        run_conf={"tube": "copies", "order_column": "tail", "chunk_size": 100}
    )
    assert states(run) == {"tables": "success", "backfill": "success"}
    for _ in range(2):
        assert set(states(example("tube_replay").test()).values()) == {"success"}
    assert copy_of(planes) == [(1, "N1"), (2, "N2")]


def test_a_backfill_from_the_form_takes_tables_of_any_name_and_whole_numbers_as_json_has_them(
    example: Example, planes: psycopg.Connection[Any]
) -> None:
    """Takes seconds: a run of a whole DAG by Airflow."""
    planes.execute(
        'create table public."a,b.c" (id bigint primary key); insert into public."a,b.c" values (7);'
        "select tube.tube_table_ensure_attached('copies', 'public.\"a,b.c\"', 0)"
    )
    lines = [' public."a,b.c" ', ""]
    given = {"tube": "copies", "tables": lines, "order_column": None, "chunk_size": 20000.0}
    run = example("tube_backfill").test(run_conf=given)
    assert states(run) == {"tables": "success", "backfill": "success"}
    assert planes.execute("select ids from public.copies where op = 'B' and ids <> '{}'").fetchall() == [
        ([7],)
    ]


def test_a_backfill_from_the_form_of_a_tube_without_tables_fails(
    example: Example, planes: psycopg.Connection[Any]
) -> None:
    planes.execute("select tube.tube_ensure_exists('bare')")
    run = example("tube_backfill").test(run_conf={"tube": "bare", "tables": None})
    assert states(run)["tables"] == "failed"


@pytest.mark.parametrize(
    "nonsense",
    [
        {},
        {"tube": ""},
        {"tube": " "},
        {"tube": "q", "chunk_size": 0},
        {"tube": "q", "tables": ["plane"]},
        {"tube": "q", "pause": -1},
    ],
)
def test_the_form_of_a_backfill_refuses_nonsense(example: Example, nonsense: dict[str, Any]) -> None:
    with pytest.raises(ParamValidationError):
        example("tube_backfill").test(run_conf=nonsense)


def test_event_handlers_keep_each_change_of_a_table_once(
    example: Example, airline: psycopg.Connection[Any]
) -> None:
    airline.execute(
        "create table public.flight (id bigint primary key, tail text);"
        "create table flight_history (event_id text primary key, topic text not null, flight jsonb not null);"
        "select pgmb.push_table_mutations('public.flight')"
    )
    for statement in (
        "select 1",
        "insert into flight values (1, 'N1'), (2, 'N2'); update flight set tail = null where id = 2",
        "delete from flight where id = 1",
    ):
        airline.execute(statement)
        assert states(example("event_handlers").test()) == {"subscribe": "success", "handle": "success"}
    rows = airline.execute("select topic, flight from flight_history order by event_id").fetchall()
    assert rows == [
        ("public.flight.insert", {"id": 1, "tail": "N1"}),
        ("public.flight.insert", {"id": 2, "tail": "N2"}),
        ("public.flight.update", {"id": 2, "tail": None}),
        ("public.flight.delete", {"id": 1, "tail": "N1"}),
    ]


def is_due(connection: psycopg.Connection[Any]) -> bool:
    """Whether a watcher would start the handlers."""
    due = "select bool_or(mbus.lag(qname, 'default', 1) ->> 'ready' <> '0') from mbus.queue where qname <> 'bungs'"
    return bool(queues.one(connection, due))


def handle_tours(example: Example, connection: psycopg.Connection[Any]) -> None:
    """Run the handlers until nothing is due."""
    while is_due(connection):
        assert set(states(example("tour_handlers").test()).values()) == {"success"}


@pytest.mark.hstore
@pytest.mark.release("every run books a tour by this DAG, and tests of sagas undo their steps in many orders")
def test_tour_booking_books_nothing_where_an_offer_is_booked_up(
    example: Example, airline: psycopg.Connection[Any]
) -> None:
    """Takes seconds: runs of whole DAGs by Airflow, with the steps of a saga."""
    airline.execute(TOURS)
    airline.execute("update offer set free = 0 where what = 'flight_back'")
    started = example("tour_booking").test(run_conf={"tour_id": 7}, mark_success_pattern="booked")
    assert set(states(started).values()) == {"success"}
    handle_tours(example, airline)
    assert tour_of(airline) == ("cancelled: flight_back is booked up", 0, 4)


def tour_of(connection: psycopg.Connection[Any]) -> tuple[str, int, int]:
    """Return the state of the tour, the number of its bookings, and the number of free places in all offers."""
    query = "select state, (select count(*) from booking where tour_id = 7), (select sum(free) from offer) from tour"
    row = connection.execute(query).fetchone()
    assert row is not None
    return str(row[0]), int(row[1]), int(row[2])


@pytest.mark.hstore
def test_tour_booking_books_all_although_a_step_has_to_wait(
    example: Example, airline: psycopg.Connection[Any], connect: Connect
) -> None:
    """Takes seconds: runs of whole DAGs by Airflow, with the steps of a saga."""
    airline.execute(TOURS)
    example("tour_booking").test(run_conf={"tour_id": 7}, mark_success_pattern="booked")
    other = connect(autocommit=False)
    other.execute("select from offer where what = 'room' for update")
    handle_tours(example, airline)
    assert airline.execute(
        "select state, error from mbus.saga, mbus.saga_message where tries > 1"
    ).fetchall() == [("forward", "room is in other hands")]
    other.rollback()
    airline.execute("update mbus.apart set due = now() where due > now()")
    assert is_due(airline)
    handle_tours(example, airline)
    assert tour_of(airline) == ("booked", 5, 0)


def test_topology_masters_waits_for_the_master_of_each_replicaset_and_logs_who_is_new(
    example: Example,
    db: str,
    role: Callable[[str], Role],
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The DAG has only the rights that docs/reference/roles.md gives it."""
    connection, limited, feed = connect(), role("catalogue"), TopologyFeed("masters")
    make_catalogue(connection)
    connection.execute("select topology.grant_consumer(%s)", [limited.name])
    monkeypatch.setenv("AIRFLOW_CONN_CATALOGUE", uri(limited.conninfo))
    assert set(states(example("topology_masters").test()).values()) == {"success"}
    connection.execute("select topology.set_master('r1', 'r1-i2')")
    assert lag(connection, connection, feed).ready == 1
    caplog.set_level("INFO")
    caplog.clear()
    assert set(states(example("topology_masters").test()).values()) == {"success"}
    assert [line for line in caplog.messages if "is the master of" in line] == [
        "r1-i2 is the master of replicaset r1"
    ]
    assert lag(connection, connection, feed).ready == 0
