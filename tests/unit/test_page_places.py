"""The connections and consumers that a serialized DAG names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk import DAG, Asset

from airflow_pgchange.admin.dead_letters import Letter
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.assets.targets import target_tables
from airflow_pgchange.feeds import AllTubes, CommitFeed, to_json
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.plugins import datamodels, page
from airflow_pgchange.plugins.dag_reasons import last_runs, log_url
from airflow_pgchange.plugins.databases import Named, ParsedDag, Place, Places, named_in
from airflow_pgchange.plugins.dead_letters import grouped
from airflow_pgchange.plugins.watched_assets import Clash, clashes
from airflow_pgchange.utils.compat import dag_serialization

FEED = CommitFeed("delays", 0)


def process(*_: Any) -> None:
    """Nothing."""


def named(dag: DAG) -> set[Named]:
    return set(named_in(dag_serialization().to_dict(dag)))


def test_an_asset_names_its_consumer_and_both_of_its_databases() -> None:
    with DAG("watched", schedule=[feed_asset(FEED, "airline", "flights")]) as dag:
        pass
    assert named(dag) == {Named(Place("airline", "flights"), "commits:delays/0")}


def test_a_sensor_for_all_workers_names_each_worker_of_each_tube() -> None:
    with DAG("replayed", schedule=[feed_asset(AllTubes(), "airline")]) as dag:
        pass
    places = Places()
    for one in named(dag):
        places.add("replayed", one)
    assert places.naming(Place("airline"), "tube", "tube:copies/0") == {"replayed"}
    assert places.naming(Place("airline"), "commit", "commits:delays/0") == set()
    assert places.naming(Place("elsewhere"), "tube", "tube:copies/0") == set()


def test_an_operator_names_its_consumer() -> None:
    with DAG("worked") as dag:
        BatchOperator(task_id="work", feed=FEED, postgres_conn_id="airline", process=process)
    assert named(dag) == {Named(Place("airline"), "commits:delays/0", "beginning", "work")}


def test_a_task_names_what_it_writes() -> None:
    with DAG("worked") as dag:
        BatchOperator(
            task_id="work",
            feed=FEED,
            postgres_conn_id="airline",
            process=process,
            outlets=[target_tables("balances"), Asset("report")],
        )
    places = Places()
    for one in named_in(dag_serialization().to_dict(dag)):
        places.add("worked", one)
    naming = places.consumers[Place("airline")]["commit", "commits:delays/0"]
    assert naming.targets == {("worked", "balances"), ("worked", "report")}
    assert naming.tasks == {("worked", "work")}


def test_a_mapped_operator_names_its_connection() -> None:
    with DAG("mapped") as dag:
        mapped = BatchOperator.partial(task_id="work", postgres_conn_id="airline", process=process)
        mapped.expand(feed=[{"kind": "commit", "consumer": "delays", "branch": 0}])
    assert named(dag) == {Named(Place("airline"), None)}


def test_upkeep_names_its_connection() -> None:
    with DAG("kept") as dag:
        MaintenanceOperator(task_id="look_after", postgres_conn_id="airline")
    assert named(dag) == {Named(Place("airline"), None)}


def clash(*assets: Asset) -> Clash | None:
    """Return the clashes of assets, each in its own DAG: ``dag_0``, ``dag_1``."""
    given = {}
    for number, asset in enumerate(assets):
        with DAG(f"dag_{number}", schedule=[asset]) as dag:
            pass
        given[dag.dag_id] = ParsedDag.of(dag_serialization().to_dict(dag)).assets
    found = clashes(given)
    return found[0] if found else None


def test_an_asset_that_each_dag_gives_the_same_watcher_is_as_it_should_be() -> None:
    assert (
        clash(feed_asset(FEED, "airline", max_age=60), feed_asset(FEED, "airline", max_age="1 min")) is None
    )
    assert clash(feed_asset(FEED, "airline"), feed_asset(FEED, "airline", max_age=60)) is None
    assert clash(Asset("mine"), feed_asset(FEED, "airline", name="mine")) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"min_changes": 5},
            "min_changes=1 by dag_0; min_changes=5 by dag_1; leave out its name, or give each",
        ),
        (
            {"poll_interval": 5},
            "poll_interval=0.1 by dag_0; poll_interval=5.0 by dag_1; give it the same poll_interval",
        ),
        (
            {"max_lag": 60},
            "max_lag=60.0 by dag_1; max_lag=None by dag_0; give it the same max_lag",
        ),
        (
            {"source_conn_id": "flights"},
            "source_conn_id='flights' by dag_1; source_conn_id=None by dag_0; give it the",
        ),
        (
            {"feed": CommitFeed("copies", 0)},
            "feed='commits:copies/0' by dag_1; feed='commits:delays/0' by dag_0; leave",
        ),
        (
            {"postgres_conn_id": "railway"},
            "postgres_conn_id='airline' by dag_0; postgres_conn_id='railway' by dag_1",
        ),
    ],
)
def test_an_asset_that_two_dags_give_different_watchers_is_told_with_both(
    given: dict[str, Any], told: str
) -> None:
    plain = {"feed": FEED, "postgres_conn_id": "airline", "name": "mine"}
    found = clash(feed_asset(**plain), feed_asset(**(plain | given)))
    assert found is not None
    assert told in found.description()


def test_dags_that_a_person_may_not_read_are_not_named() -> None:
    found = clash(
        feed_asset(FEED, "airline", name="mine"), feed_asset(FEED, "airline", name="mine", max_age=1)
    )
    assert found is not None
    told = found.description(["dag_1"])
    assert "max_age=1.0 by dag_1; max_age=None by another DAG" in told


def test_a_template_names_nothing_yet() -> None:
    with DAG("rendered") as dag:
        MaintenanceOperator(task_id="look_after", postgres_conn_id="{{ params.where }}")
    assert named(dag) == set()


def test_a_start_that_a_run_chooses_is_told_as_its_template() -> None:
    with DAG("chosen") as dag:
        feed = {**to_json(FEED), "start": "{{ params.start }}"}
        BatchOperator(task_id="count", feed=feed, postgres_conn_id="airline", process=process)
    assert {one.start for one in named(dag)} == {"{{ params.start }}"}


def test_the_same_connection_twice_is_one_database() -> None:
    with DAG("watched", schedule=[feed_asset(FEED, "airline", "airline")]) as dag:
        pass
    assert {one.place for one in named(dag)} == {Place("airline")}


@pytest.mark.parametrize(
    "node", [None, 7, {"uri": "pgchange://airline/unheard?"}, {"postgres_conn_id": "other"}]
)
def test_a_task_that_is_not_ours_names_no_connection(node: Any) -> None:
    assert list(named_in(node)) == []


def test_the_pages_files_have_another_version_where_one_of_them_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = set()
    for files in ({"main.js": b"1"}, {"main.js": b"2"}, {"other.js": b"2"}, {"main.js": b"2", "b.js": b""}):
        monkeypatch.setattr(page, "files", lambda files=files: files)
        versions.add(page.version.__wrapped__())
    assert len(versions) == 4


def failed(task_id: str, state: str) -> tuple[datamodels.Run, str]:
    run = datamodels.Run(dag_id="worked", run_id="manual", task_id=task_id, map_index=-1, try_number=2)
    return run, state


@pytest.mark.parametrize(
    ("states", "task"),
    [
        ({}, None),
        ({"before": "failed", "work": "upstream_failed"}, "before"),
        ({"before": "failed", "work": "failed"}, "work"),
        ({"behind": "failed"}, None),
    ],
)
def test_a_last_run_counts_as_failed_if_the_task_that_claims_failed_or_was_not_begun(
    states: dict[str, str], task: str | None
) -> None:
    tries = {"worked": [failed(task_id, state) for task_id, state in states.items()]}
    found = last_runs(tries, {"worked"}, {("worked", "work")})
    assert [one.run.task_id for one in found if one.run] == ([] if task is None else [task])


def test_the_log_of_a_try_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/base/")
    run = datamodels.Run(dag_id="d", run_id="manual__1+0", task_id="t", map_index=3, try_number=2)
    assert (
        log_url(run) == "https://airflow.example/base/dags/d/runs/manual__1%2B0/tasks/t/mapped/3?try_number=2"
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("row 7 is missing\nDETAIL: a", "row 12 is missing\nDETAIL: b", True),
        ("no 4ffee4a6-fb05-23ee-3b8e-ecbcc0cbfad7", "no 5ffee4a6-fb05-23ee-3b8e-ecbcc0cbfad8", True),
        ("at 2026-11-29 12:00:01", "at 2025-01-02 03:04:05", True),
        ("row 7 is missing", "row 7 is locked", False),
        ("deadbeef", "feedface", False),
    ],
)
def test_letters_are_grouped_by_what_they_failed_on(one: str, other: str, same: bool) -> None:
    held = [letter(number, error) for number, error in enumerate((one, other))]
    groups = list(grouped(held).values())
    assert groups == ([held[::-1]] if same else [[held[1]], [held[0]]])


def letter(number: int, error: str) -> Letter:
    then = datetime(2026, 1, 1, tzinfo=UTC)
    return Letter(number, "commit", "commits:c/0", None, 1, "why", error, 3, "me", then, None, False, None)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"error": "no such row"}, "failing"),
        ({"error": "no such row", "at_work": True}, "working"),
        ({"held_back_by": "a person", "at_work": True}, "held back"),
        ({"at_work": True}, "working"),
        ({"ready": None}, "unknown"),
        ({"ready": 7, "registered": False}, "new"),
        ({"ready": 7}, "ready"),
        ({}, "idle"),
    ],
)
def test_the_state_of_a_consumer_is_one_word(row: dict[str, Any], word: str) -> None:
    idle = {"error": None, "at_work": False, "held_back_by": None, "ready": 0, "registered": True}
    assert datamodels.standing({**idle, **row}) == word
