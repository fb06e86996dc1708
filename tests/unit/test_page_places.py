"""Which connections and consumers a serialized DAG names."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import AllTubes, CommitFeed
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.maintenance import MaintenanceOperator
from airflow_pgchange.plugins import datamodels, page
from airflow_pgchange.plugins.places import Named, Place, Places, named_in

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
    assert named(dag) == {Named(Place("airline"), "commits:delays/0")}


def test_a_mapped_operator_names_its_connection() -> None:
    with DAG("mapped") as dag:
        mapped = BatchOperator.partial(task_id="work", postgres_conn_id="airline", process=process)
        mapped.expand(feed=[{"kind": "commit", "consumer_id": "delays", "branch_id": 0}])
    assert named(dag) == {Named(Place("airline"), None)}


def test_upkeep_names_its_connection() -> None:
    with DAG("kept") as dag:
        MaintenanceOperator(task_id="look_after", postgres_conn_id="airline")
    assert named(dag) == {Named(Place("airline"), None)}


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
