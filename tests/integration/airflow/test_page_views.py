"""The routes of the event log and of the topology: their answers, and the users who may see them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from airflow_pgchange.plugins import event_log, topology
from airflow_pgchange.provider_info import GUIDES
from tests import events, page
from tests.airflow_home import uri
from tests.event_keeping import maintain
from tests.ledger import Connect
from tests.topology import make_catalogue
from tests.tubes import one

EVENTS = "/connections/airline/events"
TOPOLOGY = "/connections/airline/topology"
People = Callable[[str | None], page.Person]


@pytest.fixture
def people(airflow: FastAPI, db: str, monkeypatch: pytest.MonkeyPatch) -> People:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", "postgres://somebody@127.0.0.1:1/nowhere")
    return page.afresh(airflow)


def told(person: page.Person, path: str) -> dict[str, Any]:
    """Return the answer of a route once its database has answered or failed."""
    deadline = time.monotonic() + 30
    while True:
        answer = person.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        if found["installed"] is not None or found["failure"]:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def the_current(partitions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the partition that is written to now.

    Another partition is from the hour in which the template was created.
    """
    (found,) = [one for one in partitions if one["state"] == "current"]
    return found


def test_a_user_who_may_read_a_dag_sees_groups_their_readers_and_partitions(
    people: People, connect: Connect
) -> None:
    """Takes seconds if it is the first test that needs Airflow's own database and API: they are created."""
    connection, reader = connect(), connect()
    maintain(connection)
    events.subscribe(connection, "billing", params={"topic": "order.paid"})
    events.publish(connection, *["order.paid"] * 3)
    events.poll_all(connection)
    reader.execute("set application_name = 'bookkeeper'")
    events.read(reader, "billing", peek=False)
    for role in page.ROLES:
        found = told(people(role), EVENTS)
        (group,) = found["groups"]
        assert (group["name"], group["subscriptions"], group["read_upto"]) == ("billing", 1, None), role
        assert (group["reader"], group["application"]) == (reader.info.backend_pid, "bookkeeper"), role
        current = the_current(found["partitions"])
        assert current["unread"] == [{"group": "billing", "events": 3, "exact": True}], role
        log = found["log"]
        assert (log["events"], log["waiting"], log["dispatcher"]) == (3, 0, None), role
        assert found["failure"] is None, role


def test_only_users_who_may_read_the_connection_see_the_selection_of_a_group(
    people: People, connect: Connect
) -> None:
    params = {"topic": "order.paid", "partition": 1, "partitions": 4}
    events.subscribe(connect(), "billing", params=params)
    for role, chosen in {"viewer": ([], []), "op": (["order.paid"], ["1 of 4"])}.items():
        (group,) = told(people(role), EVENTS)["groups"]
        assert (group["topics"], group["parts"]) == chosen, role


def test_groups_share_what_is_looked_at_in_a_partition(
    people: People, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect()
    maintain(connection)
    for name in ("billing", "shipping"):
        events.subscribe(connection, name)
    for _ in range(3):
        events.publish(connection, "order.paid")
        events.poll_all(connection)
    monkeypatch.setattr(event_log, "UPTO", 4)
    current = the_current(told(people("viewer"), EVENTS)["partitions"])
    assert [(one["events"], one["exact"]) for one in current["unread"]] == [(2, False)] * 2


@pytest.mark.parametrize("patience", ["100ms", "10s"])
def test_groups_are_shown_also_where_partitions_take_too_long(
    people: People, connect: Connect, monkeypatch: pytest.MonkeyPatch, patience: str
) -> None:
    """Takes about a second: the page waits so long for a lock."""
    connection, holder = connect(), connect(autocommit=False)
    maintain(connection)
    events.subscribe(connection, "billing")
    monkeypatch.setattr(event_log, "PATIENCE", patience, raising=False)
    holder.execute("lock table pgmb.dispatched")
    found = told(people("viewer"), EVENTS)
    assert ([group["name"] for group in found["groups"]], found["partitions"]) == (["billing"], [])
    assert (found["left_out"][:24], found["failure"]) == ("Partitions are left out:", None)


def test_the_holder_of_a_lock_for_which_a_reader_waits_is_shown(people: People, connect: Connect) -> None:
    connection, holder = connect(), connect(autocommit=False)
    events.subscribe(connection, "billing")
    connection.execute("create table item ()")
    holder.execute("lock table item")
    waiter = connect(autocommit=False)
    waiter.execute("select pgmb.take_lock('billing')")
    waiter.pgconn.send_query(b"select from item")
    waits = "select pg_blocking_pids(%s) <> '{}'"
    while not one(connection, waits, waiter.info.backend_pid):
        time.sleep(0.01)
    (group,) = told(people("viewer"), EVENTS)["groups"]
    assert group["waits_for"] == [holder.info.backend_pid]


def test_a_log_without_groups_says_how_far_it_is(people: People) -> None:
    found = told(people("viewer"), EVENTS)
    assert (found["installed"], found["groups"]) == (True, [])
    assert found["log"]["events"] == 0


@pytest.mark.parametrize("view", ["events", "topology"])
def test_where_there_is_no_schema_it_is_said(
    people: People, bare_db: str, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", uri(bare_db))
    found = told(people("op"), f"/connections/unreachable/{view}")
    assert (found["installed"], found["log"], found["failure"]) == (False, None, None)


@pytest.mark.parametrize("view", ["events", "topology"])
def test_why_a_database_does_not_answer_is_for_who_may_read_the_connection(people: People, view: str) -> None:
    for role, why in (("viewer", False), ("op", True)):
        found = told(people(role), f"/connections/unreachable/{view}")
        assert found["installed"] is None, role
        assert ("127.0.0.1" in found["failure"]) is why, role


def test_a_user_who_may_read_a_dag_sees_instances_masters_and_owners_of_buckets(
    people: People, connect: Connect
) -> None:
    connection = connect()
    make_catalogue(connection)
    connection.execute("select topology.move_buckets('default', 0, 999, 'copying', 'r2')")
    connection.execute("select topology.set_state('r2-i2', 'Offline')")
    for role in page.ROLES:
        found = told(people(role), TOPOLOGY)
        assert [(one["name"], one["master"], one["chosen"]) for one in found["replicasets"]] == [
            ("r1", "r1-i1", None),
            ("r2", "r2-i1", None),
        ], role
        assert [(one["name"], one["replicaset"], one["state"]) for one in found["instances"]] == [
            ("r1-i1", "r1", "Online"),
            ("r1-i2", "r1", "Online"),
            ("r2-i1", "r2", "Online"),
            ("r2-i2", "r2", "Offline"),
        ], role
        assert [tuple(one.values()) for one in found["ranges"]] == [
            ("default", "0", "999", "copying", "r1", "r2"),
            ("default", "1000", "2999", "active", "r1", None),
        ], role
        assert (found["cut"], found["failure"]) == (False, None), role


def test_where_an_instance_is_is_for_who_may_read_the_connection(people: People, connect: Connect) -> None:
    make_catalogue(connect())
    for role, address in (("viewer", None), ("op", "127.0.0.1:11")):
        assert told(people(role), TOPOLOGY)["instances"][0]["address"] == address, role


def test_ranges_of_one_owner_that_lie_side_by_side_are_one(people: People, connect: Connect) -> None:
    connection = connect()
    make_catalogue(connection)
    for first, last, owner in ((3000, 3999, "r1"), (4000, 4999, "r2"), (6000, 6999, "r2")):
        connection.execute("select topology.assign_buckets('default', %s, %s, %s)", [first, last, owner])
    found = told(people("viewer"), TOPOLOGY)["ranges"]
    assert [(one["first"], one["last"], one["replicaset"]) for one in found] == [
        ("0", "3999", "r1"),
        ("4000", "4999", "r2"),
        ("6000", "6999", "r2"),
    ]


def test_a_range_that_is_copied_is_its_targets(people: People, connect: Connect) -> None:
    connection = connect()
    make_catalogue(connection)
    connection.execute("select topology.move_buckets('default', 0, 2999, 'copying', 'r2')")
    connection.execute("select topology.move_buckets('default', 0, 2999, 'copied')")
    (found,) = told(people("viewer"), TOPOLOGY)["ranges"]
    assert (found["replicaset"], found["other"], found["state"]) == ("r2", "r1", "copied")


def test_of_a_large_cluster_some_is_shown_and_that_there_is_more(
    people: People, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_catalogue(connect())
    monkeypatch.setattr(topology, "INSTANCES", 3)
    found = told(people("viewer"), TOPOLOGY)
    assert (len(found["instances"]), found["cut"]) == (3, True)


def test_an_empty_catalogue_is_one(people: People) -> None:
    found = told(people("viewer"), TOPOLOGY)
    assert (found["installed"], found["replicasets"], found["ranges"]) == (True, [], [])
    assert found["log"]["changed_at"] is None


@pytest.mark.parametrize(
    ("view", "schema", "grant"), [("events", "pgmb", "consumer"), ("topology", "topology", "reader")]
)
def test_a_consumers_rights_are_enough_to_look(
    people: People,
    connect: Connect,
    role: Any,
    monkeypatch: pytest.MonkeyPatch,
    view: str,
    schema: str,
    grant: str,
) -> None:
    who = role("looker")
    connect().execute(f"select {schema}.grant_{grant}(%s::regrole)", [who.name])
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(who.conninfo))
    found = told(people("op"), f"/connections/airline/{view}")
    assert (found["installed"], found["failure"]) == (True, None)


def test_each_guide_is_there_to_be_read(people: People) -> None:
    viewer = people("viewer")
    for name in GUIDES:
        answer = viewer.get(f"/guides/{name}")
        assert answer.text.startswith("# "), name
        assert answer.headers["content-type"].startswith("text/plain"), name


def test_nothing_but_guides_is_there(people: People) -> None:
    assert people("admin").get("/guides/..%2FREADME").status_code == 404
    assert people("admin").get("/guides/images").status_code == 404
