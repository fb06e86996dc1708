"""Which connections and consumers a serialized DAG names."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, Asset
from airflow.serialization.serialized_objects import DagSerialization

from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import AllTubes, CommitFeed
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.plugins import datamodels, page
from airflow_pgchange.plugins.places import Named, ParsedDag, Place, Places, named_in
from airflow_pgchange.plugins.watched_assets import Clash, clashes

FEED = CommitFeed("delays", 0)


def process(*_: Any) -> None:
    """Nothing."""


def named(dag: DAG) -> set[Named]:
    return set(named_in(DagSerialization.to_dict(dag)))


def test_an_asset_names_its_consumer_and_both_of_its_databases() -> None:
    with DAG("watched", schedule=[feed_asset(FEED, "airline", "flights")]) as dag:
        pass
    assert named(dag) == {Named(Place("airline", "flights"), "commits:delays/0")}


def test_who_waits_for_every_worker_of_every_tube_names_each_of_them() -> None:
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
    assert named(dag) == {Named(Place("airline"), "commits:delays/0", "beginning")}


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
    """What is wrong with assets that are each of a DAG of its own: ``dag_0``, ``dag_1``."""
    given = {}
    for number, asset in enumerate(assets):
        with DAG(f"dag_{number}", schedule=[asset]) as dag:
            pass
        given[dag.dag_id] = ParsedDag.of(DagSerialization.to_dict(dag)).assets
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
    assert told in found.told()


def test_dags_that_a_person_may_not_read_are_not_named() -> None:
    found = clash(
        feed_asset(FEED, "airline", name="mine"), feed_asset(FEED, "airline", name="mine", max_age=1)
    )
    assert found is not None
    told = found.told(["dag_1"])
    assert "max_age=1.0 by dag_1; max_age=None by another DAG" in told


def test_a_template_names_nothing_yet() -> None:
    with DAG("rendered") as dag:
        MaintenanceOperator(task_id="look_after", postgres_conn_id="{{ params.where }}")
    assert named(dag) == set()


def test_the_same_connection_twice_is_one_database() -> None:
    with DAG("watched", schedule=[feed_asset(FEED, "airline", "airline")]) as dag:
        pass
    assert {one.place for one in named(dag)} == {Place("airline")}


@pytest.mark.parametrize(
    "node", [None, 7, {"uri": "pgchange://airline/unheard?"}, {"postgres_conn_id": "other"}]
)
def test_what_is_not_ours_names_nothing(node: Any) -> None:
    assert list(named_in(node)) == []


def test_the_pages_files_have_another_version_where_one_of_them_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = set()
    for files in ({"main.js": b"1"}, {"main.js": b"2"}, {"other.js": b"2"}, {"main.js": b"2", "b.js": b""}):
        monkeypatch.setattr(page, "files", lambda files=files: files)
        versions.add(page.version.__wrapped__())
    assert len(versions) == 4


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"error": "no such row"}, "failing"),
        ({"error": "no such row", "at_work": True}, "working"),
        ({"held_back_by": "a person", "at_work": True}, "held back"),
        ({"at_work": True}, "working"),
        ({"ready": None}, "unknown"),
        ({"ready": 7}, "ready"),
        ({}, "idle"),
    ],
)
def test_one_word_says_how_a_consumer_stands(row: dict[str, Any], word: str) -> None:
    idle = {"error": None, "at_work": False, "held_back_by": None, "ready": 0}
    assert datamodels.standing({**idle, **row}) == word
