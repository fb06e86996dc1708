"""The API of the page in Airflow's API: its rights, answers and actions."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from fastapi import FastAPI
from psycopg import sql

from airflow_pgchange import detached
from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import StaleClaim
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.plugins import databases as page_databases
from airflow_pgchange.plugins import query_threads, request_limit
from airflow_pgchange.plugins.watched_assets import Clash, WatchedAsset
from tests import page
from tests.airflow_home import uri
from tests.ledger import Connect

FEED = CommitFeed("delays", 0)
AIRLINE = "/connections/airline"
SKIP = {"consumer": "commits:delays/0", "reason": "no use"}
ACTIONS: list[tuple[str, dict[str, Any]]] = [
    ("consumers/skip", SKIP),
    ("consumers/release", {"consumer": "commits:delays/0"}),
    ("consumers/move", {"consumer": "commits:delays/0", "to": "now"}),
    ("consumers/repair", {"consumer": "commits:delays/0"}),
    ("letters/redrive", {"ids": [1]}),
    ("letters/drop", {"ids": [1]}),
    ("letters/erase", {"key": "carrier", "consumer": "commits:delays/0"}),
    ("maintenance", {}),
    ("backfills/start", {"tube": "copies", "table": "ledger"}),
    ("backfills/1/pause", {}),
    ("backfills/1/resume", {}),
    ("backfills/1/cancel", {}),
    ("consumers/drop", {"consumer": "commits:delays/0"}),
]
PAST = f"{AIRLINE}/consumer?kind=commit&consumer=commits:delays/0"
BACKFILLS = f"{AIRLINE}/backfills"
READ = (
    BACKFILLS,
    f"{AIRLINE}/queues",
    f"{AIRLINE}/sagas",
    f"{AIRLINE}/sagas/1",
    "/guides/queues",
    f"{AIRLINE}/events",
    f"{AIRLINE}/topology",
    "/guides/events",
    "/overview",
    PAST,
    f"{AIRLINE}/letters",
    f"{AIRLINE}/letters/1",
    "/openapi.json",
    "/page/1/main.js",
)
SECRET = "secretword"
People = Callable[[str | None], page.Person]


@pytest.fixture
def people(airflow: FastAPI, db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> People:
    """A database with three commits, and a database that is down.

    A consumer has claimed one of the commits, and has failed on it.
    """
    connect().execute(
        "create table ledger (id bigint generated always as identity primary key);"
        "select revision.track('ledger', branch_id => '0');"
        "insert into ledger select from generate_series(1, 3);"
        "select tube.tube_ensure_exists('copies'), tube.tube_table_ensure_attached('copies', 'ledger', 0);"
    )
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        raise ZeroDivisionError
    connect().execute("update pgchange.claim set attempt = 3, error = 'name of a passenger'")
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", f"postgres://somebody:{SECRET}@127.0.0.1:1/nowhere")
    return page.afresh(airflow)


def consumer(person: page.Person) -> dict[str, Any]:
    """Return the consumer of the ledger as a user sees it."""
    (found,) = [one for one in page.overview(person)["consumers"] if one["consumer"] == "commits:delays/0"]
    return dict(found)


def databases(person: page.Person) -> dict[str, dict[str, Any]]:
    return {each["connection"]: each for each in page.overview(person)["databases"]}


def told_of(person: page.Person, path: str, what: str) -> dict[str, Any]:
    """Return the answer of a route once its database has answered or failed."""
    deadline = time.monotonic() + 30
    while True:
        answer = person.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        if found[what] or found["failure"]:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nobody_who_is_not_logged_in_gets_anything(people: People) -> None:
    """Takes seconds if it is the first test that needs Airflow's own database and API: they are created."""
    nobody = people(None)
    for path in READ:
        assert nobody.get(path).status_code == 401, path
    for action, body in ACTIONS:
        assert nobody.post(f"{AIRLINE}/{action}", body).status_code == 401, action


def test_a_user_who_may_not_see_plugins_gets_nothing(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    monkeypatch.setattr(get_auth_manager(), "is_authorized_view", lambda **_: False)
    admin, noted = people("admin"), page.audit_log()
    for path in READ:
        assert admin.get(path).status_code == 403, path
    for action, body in ACTIONS:
        assert admin.post(f"{AIRLINE}/{action}", body).status_code == 403, action
    assert page.audit_log() == noted


def test_a_user_who_may_read_no_dag_and_no_connection_sees_no_database(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: {"elsewhere"})
    assert page.overview(people("viewer")) == {
        "databases": [],
        "consumers": [],
        "findings": [],
        "watchers": [],
        "paused": [],
    }


def test_a_user_who_may_read_a_dag_sees_lag_and_state_of_its_consumers(people: People) -> None:
    for role in page.ROLES:
        seen = consumer(people(role))
        assert (seen["consumer"], seen["state"], seen["ready"]) == ("commits:delays/0", "failing", 3), role
        assert seen["dags"] == ["flight_delays"], role


def test_a_user_who_may_not_read_a_connection_sees_no_error_and_no_letter(people: People) -> None:
    for role in ("viewer", "user"):
        person = people(role)
        found = page.overview(person)
        assert "passenger" not in str(found), role
        assert [(one["severity"], one["told"]) for one in found["findings"]] == [("error", None)], role
        assert person.get(f"{AIRLINE}/letters").status_code == 403, role
        assert person.get(f"{AIRLINE}/letters/1").status_code == 403, role


def test_a_consumers_past_is_for_who_may_read_its_dag_and_what_it_failed_on_for_who_may_read_the_connection(
    people: People, connect: Connect
) -> None:
    connect().execute("update pgchange.batch set error = 'name of a passenger'")
    for role, told in (("viewer", None), ("op", "name of a passenger")):
        person = people(role)
        deadline = time.monotonic() + 30
        while not (seen := consumer(person))["trend"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert (seen["rate_in"], seen["rate_out"], seen["trend"][-2:]) == (None, None, [None, 3]), role
        past = told_of(person, PAST, "attempts")
        assert {(one["ready"], one["waiting"]) for one in past["samples"]} == {(3, 0)}, role
        attempts = [(one["attempt"], one["changes"], one["error"]) for one in past["attempts"]]
        assert (attempts, past["failure"]) == ([(1, 1, told)], None), role


def test_the_past_of_what_one_may_not_see_is_refused(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: {"copies"})
    viewer = people("viewer")
    assert viewer.get(PAST.replace("airline", "unreachable")).status_code == 403
    assert viewer.get(PAST.replace("airline", "nobodys")).status_code == 403
    assert viewer.get(f"{PAST}&source=unreachable").status_code == 403
    assert viewer.get(PAST).status_code == 200


MADE_UP = (
    f"{AIRLINE}/consumer?kind=commit&consumer=commits:nobody/0",
    f"{AIRLINE}/consumer?kind=tube&consumer=commits:delays/0",
    f"{PAST}&source=warehouse",
    f"{AIRLINE}/letters?source=warehouse",
    "/connections/nobodys/letters",
)


def test_what_is_made_up_is_not_there_and_nothing_is_kept_for_it(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_pgchange.plugins import page_queries

    asked = []
    monkeypatch.setattr(page_queries.QueryCache, "answer", lambda *question: asked.append(question))
    op = people("op")
    consumer(op)
    for made_up in MADE_UP:
        assert op.get(made_up).status_code == 404, made_up
        assert asked == [], made_up


def test_a_connection_that_no_dag_names_is_not_connected_to_and_nothing_is_noted(
    people: People, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_ALIEN", uri(db))
    monkeypatch.setattr(query_threads, "connect", lambda *_, **__: pytest.fail("it was connected to"))
    admin, noted = people("admin"), page.audit_log()
    for path in ("letters/1", "letters/1?source=airline", "letters", "sagas/1", "backfills"):
        answer = admin.get(f"/connections/alien/{path}")
        assert answer.status_code in (403, 404), path
    for action, body in ACTIONS:
        for place in (f"alien/{action}", f"airline/{action}?source=alien", f"alien/{action}?source=airline"):
            answer = admin.post(f"/connections/{place}", body)
            assert answer.status_code == 404, place
            assert answer.json()["detail"].startswith("no DAG names this connection"), place
    assert page.audit_log() == noted


def test_requests_wait_for_a_free_query_thread_and_then_are_refused(
    people: People, airflow: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limit, "PATIENCE", 0.0)
    page.mounted(airflow).app.state.request_limits = request_limit.RequestLimits(
        request_limit.RequestLimit(0), request_limit.RequestLimit(0)
    )
    admin, noted = people("admin"), page.audit_log()
    answers = [admin.get(path) for path in READ if "connections" in path or "overview" in path]
    answers += [admin.post(f"{AIRLINE}/{action}", body) for action, body in ACTIONS]
    assert {(answer.status_code, answer.headers["Retry-After"]) for answer in answers} == {(503, "5")}
    assert page.audit_log() == noted


def test_the_past_of_who_is_in_a_database_that_never_answered_is_not_asked_for(people: People) -> None:
    past = told_of(people("viewer"), PAST.replace("airline", "unreachable"), "attempts")
    assert past == {"samples": [], "attempts": [], "failure": "the database does not answer"}


TRY = {"run_id": "manual 1", "task_id": "look_after", "map_index": -1, "try_number": 2}


RUNS: dict[str | None, dict[str, Any] | None] = {
    "flight_delays/manual%201/look_after/-1/2": {"dag_id": "flight_delays", **TRY},
    "elsewhere/manual%201/look_after/-1/2": None,
    "flight_delays/manual%201/look_after/-1": None,
    "flight_delays/manual%201/look_after/-1/second": None,
    None: None,
}


def attempts(connection: psycopg.Connection[Any], column: str, values: Iterable[str | None]) -> None:
    """Replace the recorded attempt by an attempt for each of these values in a column. The first value is in the
    latest."""
    query = sql.SQL(
        "insert into pgchange.batch (kind, consumer, batch_id, attempt, count, number, noted_at, {}) "
        "select kind, consumer, batch_id, attempt + n, count, number, noted_at - n * interval '1 second', v::{} "
        "from pgchange.batch, unnest(%s::text[]) with ordinality as u (v, n)"
    ).format(sql.Identifier(column), sql.SQL("text" if column == "run" else "jsonb"))
    connection.execute(query, [list(values)])
    connection.execute("delete from pgchange.batch where attempt = 1")


def test_the_task_that_made_an_attempt_is_for_who_may_read_its_dag(people: People, connect: Connect) -> None:
    attempts(connect(), "run", RUNS)
    found = told_of(people("viewer"), PAST, "attempts")["attempts"]
    assert [one["run"] for one in found] == list(RUNS.values())


PHASES: dict[str, dict[str, float]] = {
    "[1]": {},
    '"long"': {},
    '{"read": "long", "write": null, "spark": 1e400, "ack": true, "claim": 0.5}': {"claim": 0.5},
}


def test_a_past_is_shown_whatever_was_told_of_its_phases(people: People, connect: Connect) -> None:
    attempts(connect(), "seconds", PHASES)
    past = told_of(people("viewer"), PAST, "attempts")
    assert past["failure"] is None
    assert [one["seconds"] for one in past["attempts"]] == list(PHASES.values())


def test_what_a_letter_holds_is_shown_and_cut_where_it_is_long(
    people: People, airflow: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_pgchange.plugins import datamodels

    op = people("op")
    assert op.post(f"{AIRLINE}/consumers/skip", SKIP).status_code == 200
    (letter,) = op.get(f"{AIRLINE}/letters").json()["letters"]
    path = f"{AIRLINE}/letters/{letter['id']}"
    held = told_of(op, path, "content")
    assert letter["batch"] in held["content"]
    assert (held["cut"], held["failure"]) == (False, None)
    monkeypatch.setattr(datamodels, "SHOWN", 3)
    people = page.afresh(airflow)
    assert told_of(people("op"), path, "content") == {
        "content": held["content"][:3],
        "cut": True,
        "failure": None,
    }
    assert op.get(f"{AIRLINE}/letters/7").status_code == 404


def test_a_user_who_may_read_a_connection_sees_errors_and_their_fixes(people: People) -> None:
    for role in ("op", "admin"):
        person = people(role)
        found = page.overview(person)
        assert consumer(person)["error"] == "name of a passenger", role
        assert consumer(person)["why"].endswith(" failed: name of a passenger"), role
        mended_by = [one["call"] for one in found["findings"]]
        assert mended_by == ["to give it up: airflow-pgchange skip commits:delays/0 --reason '...'"], role
        assert person.get(f"{AIRLINE}/letters").json()["letters"] == [], role


def test_an_asset_that_dags_give_different_watchers_is_a_finding_and_in_the_log_once(
    people: People, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = '{"postgres_conn_id": "airline", "min_changes": %s}'
    watchers = {
        WatchedAsset("mine", "", FEED, asked % 1): frozenset({"flight_delays"}),
        WatchedAsset("mine", "", FEED, asked % 5): frozenset({"hidden"}),
    }
    monkeypatch.setattr(page_databases, "clashes", lambda given: [Clash("mine", watchers)])
    for role, told in (
        ("op", "min_changes=1 by flight_delays; min_changes=5 by another DAG"),
        ("viewer", None),
    ):
        (found,) = [one for one in page.overview(people(role))["findings"] if one["kind"] == "asset"]
        assert (found["connection"], found["severity"]) == ("airline", "error")
        assert found["told"] is None if told is None else told in found["told"], role
    (logged,) = {message for message in caplog.messages if "'mine'" in message}
    assert "min_changes=5 by hidden" in logged


def test_a_user_who_may_not_edit_a_connection_changes_nothing(people: People) -> None:
    for role in ("viewer", "user"):
        person = people(role)
        before, noted = consumer(person), page.audit_log()
        for action, body in ACTIONS:
            assert person.post(f"{AIRLINE}/{action}", body).status_code == 403, (role, action)
        assert consumer(person)["updated_at"] == before["updated_at"], role
        assert page.audit_log() == noted, role


def test_a_user_who_may_edit_can_do_all_actions_and_the_audit_log_has_them(
    people: People, db: str, connect: Connect
) -> None:
    op, noted = people("op"), len(page.audit_log())
    done = op.post(f"{AIRLINE}/consumers/skip", SKIP)
    assert done.status_code == 200, done.text
    (letter,) = dead_letters.letters(connect())
    assert (letter.consumer, letter.reason) == ("commits:delays/0", "no use")
    erasing = {"key": "use", "field": None, "consumer": "commits:delays/0"}
    for key, told in (
        ("use", f"letter {letter.id}: changes erased: 0"),
        ("carrier", "no letter contained this key"),
    ):
        done = op.post(f"{AIRLINE}/letters/erase", erasing | {"key": key})
        assert (done.status_code, done.json()["done"]) == (200, [told]), done.text
    (letter,) = dead_letters.letters(connect())
    assert letter.reason == "erased"
    for action in ("letters/redrive", "letters/drop"):
        done = op.post(f"{AIRLINE}/{action}", {"ids": [letter.id]})
        assert done.status_code == 200, done.text
    assert dead_letters.letters(connect()) == []
    for action, body in ACTIONS:
        if "letters" not in action and action != "consumers/skip":
            done = op.post(f"{AIRLINE}/{action}", body)
            assert done.status_code == 200, done.text
    left = connect().execute("select consumer from pgchange.status()").fetchall()
    assert ("commits:delays/0",) not in left
    entries = page.audit_log()[noted:]
    assert {who for _, who, _ in entries} == {"the_op"}
    assert entries[0][0] == "pgchange_skip"
    assert entries[0][2] == {"connection_id": "airline", "method": "POST", **SKIP}
    assert entries[1][2] == {"connection_id": "airline", "method": "POST", **erasing}
    assert [event for event, _, _ in entries] == [
        "pgchange_skip",
        "pgchange_letters_erase",
        "pgchange_letters_erase",
        "pgchange_letters_redrive",
        "pgchange_letters_drop",
        "pgchange_release",
        "pgchange_move",
        "pgchange_repair",
        "pgchange_maintenance",
        "pgchange_backfill_start",
        "pgchange_backfill_pause",
        "pgchange_backfill_resume",
        "pgchange_backfill_cancel",
        "pgchange_drop",
    ]


def test_a_lease_is_shown_and_ended(people: People, db: str, connect: Connect) -> None:
    manual_operations.skip_batch(connect(), connect(), FEED, "no use")
    connect().execute("insert into ledger default values")
    late = detached.claim(FEED, db, lease="1 hour", owner="nightly/today/job/-1")
    assert late is not None
    op = people("op")
    assert (consumer(op)["state"], consumer(op)["leased_by"]) == ("working", "nightly/today/job/-1")
    done = op.post(f"{AIRLINE}/consumers/release", {"consumer": FEED.name})
    assert (done.status_code, done.json()["done"]) == (200, [f"{FEED.name}: leases ended: 1"])
    deadline = time.monotonic() + 30
    while [consumer(op)[name] for name in ("leased_by", "leased_until")] != [None, None]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert detached.claim(FEED, db, lease="1 hour", owner="next") is not None
    with pytest.raises(StaleClaim):
        detached.ack(late, db)


OTHER_SITES = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "", "Origin": "http://testserver"},
)


def test_a_request_from_another_site_is_refused_and_not_in_the_audit_log(people: People) -> None:
    admin, noted = people("admin"), page.audit_log()
    for headers, (action, body) in itertools.product(OTHER_SITES, ACTIONS):
        answer = admin.post(f"{AIRLINE}/{action}", body, headers=headers)
        assert answer.status_code == 403, (headers, action)
    assert page.audit_log() == noted


def test_where_a_browser_does_not_say_the_site_its_origin_must_be_ours(people: People) -> None:
    admin = people("admin")
    for origin, code in (
        ({"Origin": "http://testserver:81"}, 403),
        ({}, 403),
        ({"Origin": "http://testserver"}, 200),
    ):
        answer = admin.post(f"{AIRLINE}/maintenance", site=None, headers=origin)
        assert answer.status_code == code, origin


def test_a_request_with_a_token_of_its_own_needs_no_site(people: People) -> None:
    admin = people("admin")
    answer = people(None).post(
        f"{AIRLINE}/consumers/skip", SKIP, site=None, headers={"Authorization": f"Bearer {admin.token}"}
    )
    assert answer.status_code == 200, answer.text


def test_what_is_started_paused_resumed_and_cancelled_is_so_in_the_database(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_threads, "FRESH", 0.0)
    monkeypatch.setattr(query_threads, "REST", 0.0)
    op = people("op")
    assert op.get(BACKFILLS).json()["tables"] == [{"tube": "copies", "table": "ledger"}]
    states = []
    for action, body in ACTIONS:
        if action.startswith("backfills"):
            assert op.post(f"{AIRLINE}/{action}", body).status_code == 200, action
            (found,) = op.get(BACKFILLS).json()["backfills"]
            states.append((found["state"], found["total"], found["percent"]))
    assert states == [(state, states[0][1], 0) for state in ("scheduled", "paused", "scheduled", "cancelled")]
    assert found["message"] == "cancelled by postgres"
    viewer = people("viewer").get(BACKFILLS).json()
    assert [(one["state"], one["message"]) for one in viewer["backfills"]] == [("cancelled", None)]
    assert viewer["tables"] == []


def test_a_database_without_tubes_has_no_backfills(
    people: People, bare_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", uri(bare_db))
    found = people("op").get("/connections/unreachable/backfills").json()
    assert found == {"backfills": [], "tables": [], "failure": None}


def test_watchers_are_shown_and_why_one_is_blind_to_who_may_read_the_connection(
    people: People, connect: Connect
) -> None:
    seen = '[{"feed": "commits:delays/0", "kind": "commit", "error": "no right"}]'
    connect().execute("select pgchange.note_watchers(%s)", [seen])
    for role, told in (("viewer", None), ("op", "no right")):
        (watcher,) = page.overview(people(role))["watchers"]
        assert (watcher["feed"], watcher["sees"], watcher["error"]) == ("commits:delays/0", False, told), role
        assert watcher["dags"] == ["flight_delays"], role


def test_a_right_to_the_results_is_none_to_another_source(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    manager = get_auth_manager()
    monkeypatch.setattr(
        manager, "is_authorized_connection", lambda *, details, **_: details.conn_id == "airline"
    )
    admin = people("admin")
    assert admin.post(f"{AIRLINE}/consumers/skip?source=unreachable", SKIP).status_code == 403
    assert admin.get(f"{AIRLINE}/letters?source=unreachable").status_code == 403
    assert admin.get(f"{AIRLINE}/letters").status_code == 200


def test_a_database_that_is_down_is_shown_so_and_why_only_to_who_may_read_its_connection(
    people: People,
) -> None:
    for role, told in (("viewer", False), ("admin", True)):
        down = databases(people(role))["unreachable"]
        assert down["state"] == "down"
        assert ("127.0.0.1" in str(down)) is told
        assert SECRET not in str(down)


def test_a_consumer_whose_changes_are_elsewhere_is_shown_with_what_is_there(
    people: People, db: str, other_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConsumerTransaction(CommitFeed("copies", 0), other_db, db) as transaction:
        transaction.claim(1)
        transaction.ack()
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", uri(other_db))
    found = page.overview(people("viewer"))["consumers"]
    (copies,) = [one for one in found if one["connection"] == "warehouse"]
    assert (copies["consumer"], copies["source"], copies["ready"]) == ("commits:copies/0", "airline", 2)


def test_a_consumer_that_dags_name_and_that_has_not_claimed_is_shown_with_where_it_starts(
    people: People, other_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", uri(other_db))
    found = copies(people("viewer"))
    assert (found["consumer"], found["source"], found["state"]) == ("commits:copies/0", "airline", "new")
    assert (found["new"], found["ready"]) == ("new consumer, starts at the beginning: 3 changes", 3)
    assert (found["movable"], found["dags"]) == (False, ["copies"])
    past = "/connections/warehouse/consumer?kind=commit&consumer=commits:copies/0&source=airline"
    assert people("viewer").get(past).json()["attempts"] == []


def last_run(dag_id: str, state: str) -> str:
    """Create a run of a DAG whose tasks have these states, and return its id."""
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState, TaskInstanceState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType

    run_id = f"manual__{uuid4()}"
    with create_session() as session:
        dag = SerializedDagModel.get_dag(dag_id, session=session)
        run = dag.create_dagrun(
            run_id=run_id,
            run_after=datetime.now(UTC),
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            session=session,
        )
        for ti in run.get_task_instances(session=session):
            ti.state = TaskInstanceState(state)
    return run_id


def test_why_dags_do_not_process_changes_is_told_to_who_may_read_them(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    run_id = last_run("flight_delays", "failed")
    viewer = people("viewer")
    paused, failed = consumer(viewer)["dag_reasons"]
    assert paused == {"told": "its DAG flight_delays is paused", "run": None}
    assert failed["told"] == "the last run of its DAG flight_delays failed at task look_after"
    assert (failed["run"]["run_id"], failed["run"]["map_index"]) == (run_id, -1)
    (finding,) = [one for one in page.overview(viewer)["findings"] if one["consumer"] == "commits:delays/0"]
    assert finding["dag_reasons"] == [paused, failed]
    last_run("flight_delays", "success")
    assert consumer(viewer)["dag_reasons"] == [paused]
    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: {"kept"})
    assert consumer(people("op"))["dag_reasons"] == []


def copies(person: page.Person) -> dict[str, Any]:
    """Return the consumer with its results in the warehouse and its changes elsewhere, as a user sees it."""
    (found,) = [one for one in page.overview(person)["consumers"] if one["connection"] == "warehouse"]
    return dict(found)


def test_lag_in_a_source_that_one_may_not_see_is_not_told(
    people: People, db: str, other_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    with ConsumerTransaction(CommitFeed("copies", 0), other_db, db) as transaction:
        transaction.claim(1)
        transaction.ack()
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", uri(other_db))
    noted = '[{"feed": "commits:copies/0", "kind": "commit", "ready": 2, "error": "airline is down"}]'
    with psycopg.connect(other_db) as warehouse:
        warehouse.execute("select pgchange.note_watchers(%s)", [noted])
    op = people("op")
    deadline = time.monotonic() + 30
    while not any(copies(op)["trend"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    past = "/connections/warehouse/consumer?kind=commit&consumer=commits:copies/0"
    assert told_of(op, past, "samples")["samples"]
    manager = get_auth_manager()
    monkeypatch.setattr(manager, "get_authorized_dag_ids", lambda **_: set())
    monkeypatch.setattr(
        manager, "is_authorized_connection", lambda *, details, **_: details.conn_id == "warehouse"
    )
    seen = copies(op)
    told = ("source", "ready", "waiting", "oldest_seconds", "rate_in", "rate_out", "held_back_by", "why")
    assert {name: seen[name] for name in told} == dict.fromkeys(told)
    assert (seen["trend"], seen["state"], seen["may_edit"]) == ([], "unknown", False)
    (watcher,) = page.overview(op)["watchers"]
    assert (watcher["feed"], watcher["ready"], watcher["error"]) == ("commits:copies/0", None, None)
    assert op.get(past).json()["samples"] == []


def test_connections_without_dags_are_seen_by_who_may_read_them(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__PGCHANGE__CONNECTIONS", "nobodys")
    assert "nobodys" not in databases(people("viewer"))
    assert databases(people("op"))["nobodys"]["state"] == "down"


IMPOSSIBLE: list[tuple[str, dict[str, Any], int]] = [
    (f"{AIRLINE}/consumers/skip", {"consumer": "commits:nobody/0", "reason": "no use"}, 404),
    (f"{AIRLINE}/consumers/skip", {"consumer": "?", "reason": "no use"}, 400),
    (f"{AIRLINE}/consumers/skip", {"consumer": "commits:delays/0"}, 422),
    (f"{AIRLINE}/consumers/move", {"consumer": "commits:delays/0", "to": "somewhere"}, 422),
    (f"{AIRLINE}/letters/drop", {"ids": [7]}, 404),
    ("/connections/unreachable/consumers/skip", SKIP, 503),
    ("/connections/not/there/consumers/skip", SKIP, 404),
]


def test_an_action_that_cannot_be_done_says_why(people: People) -> None:
    admin = people("admin")
    for path, body, code in IMPOSSIBLE:
        answer = admin.post(path, body)
        assert answer.status_code == code, (path, body, answer.text)
        assert answer.json()["detail"], (path, body)
        assert SECRET not in answer.text, (path, body)


def test_an_action_on_a_consumer_at_work_is_refused(people: People, db: str) -> None:
    with ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        answer = people("admin").post(
            f"{AIRLINE}/consumers/move", {"consumer": "commits:delays/0", "to": "now"}
        )
        assert answer.status_code == 409
        assert "at work" in answer.json()["detail"]
        transaction.ack()


def test_the_api_describes_itself_to_who_may_see_plugins(people: People) -> None:
    described = people("viewer").get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/overview",
        "/connections/{connection_id}/backfills",
        "/connections/{connection_id}/events",
        "/connections/{connection_id}/topology",
        "/connections/{connection_id}/consumer",
        "/connections/{connection_id}/letters",
        "/connections/{connection_id}/letters/{number}",
        "/connections/{connection_id}/queues",
        "/connections/{connection_id}/sagas",
        "/connections/{connection_id}/sagas/{number}",
        *(f"/connections/{{connection_id}}/{action.replace('/1/', '/{number}/')}" for action, _ in ACTIONS),
    }


def test_the_guide_names_what_the_audit_log_notes() -> None:
    guide = Path(__file__).parents[3].joinpath("docs/how-to/page.md").read_text()
    for action, _ in ACTIONS:
        event = "pgchange_" + re.sub("^backfills/(1/)?", "backfill_", action).removeprefix(
            "consumers/"
        ).replace("/", "_")
        assert f"`{event}`" in guide


def test_a_view_of_a_database_that_one_may_not_see_is_refused(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: {"copies"})
    viewer = people("viewer")
    for database, code in (("unreachable", 403), ("nobodys", 403), ("airline", 200)):
        for view in ("events", "topology"):
            assert viewer.get(f"/connections/{database}/{view}").status_code == code, (database, view)


def test_dags_that_are_paused_are_told_to_who_may_read_them(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    # DAGs of earlier tests may exist, too.
    assert {"copies", "flight_delays", "kept"} <= set(page.overview(people("op"))["paused"])
    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: {"copies"})
    assert page.overview(people("viewer"))["paused"] == ["copies"]


def test_the_page_is_served_as_it_is_in_this_version(people: People) -> None:
    from airflow_pgchange.plugins.page import url

    for name, kind in (("main.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
        answer = people("viewer").get(url(name).removeprefix("/pgchange"))
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind)
    assert people("viewer").get("/page/older/main.js").status_code == 404
