"""OpenLineage's own provider, listening while Airflow runs a DAG."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from demo.postgres import Cluster
from tests import quick_spark
from tests.airflow_home import DAGS, uri
from tests.conftest import database
from tests.suite.clusters import TEMPLATE

RUN = """
import sys
from tests.dag_bags import bag_of
for path in sys.argv[1:]:
    (dag,) = bag_of(path).dags.values()
    dag.test()
"""
EXAMPLES = ("movement_audit", "tube_replay")
TABLES = """
create table movement (id bigint generated always as identity primary key);
create table movement_audit (movement_id bigint primary key, batch_id uuid, committed_at timestamptz);
select revision.track('movement', branch_id => '0');
insert into movement select from generate_series(1, 3);
"""

COPIES = """
create table public.plane (id bigint primary key, tail text);
create schema copies;
create table copies.plane (id bigint primary key, tail text);
select tube.tube_ensure_exists('copies'), tube.tube_table_ensure_attached('copies', 'plane', 0);
insert into plane values (1, 'N1'), (2, 'N2');
"""

pytestmark = pytest.mark.release(
    "every run asks the operators for what they tell, and only how it is sent is left"
)


@dataclass(frozen=True)
class Told:
    """The events that OpenLineage's listener sent for the runs of two examples.

    ``events`` has the event with the batch of each run.
    """

    db: str
    events: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told(
    example: Callable[[str], Any], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    """The events of two examples, which run once and in one process, because the start of Airflow is expensive."""
    folder = tmp_path_factory.mktemp("lineage")
    for db in database(cluster, TEMPLATE):
        with psycopg.connect(db, autocommit=True) as connection:
            connection.execute(TABLES + COPIES)
        yield Told(db, told_by(db, folder))


@pytest.mark.timeout(600)
def test_a_task_tells_of_its_batch(told: Told) -> None:
    """Takes dozens of seconds: a process runs DAGs, one of them with a JVM, and the listener has a process, too."""
    event = told.events["movement_audit"]
    server = conninfo_to_dict(told.db)
    tables, name = f"postgres://{server['host']}:{server['port']}", server["dbname"]
    assert (event["eventType"], event["job"]["name"]) == ("COMPLETE", "movement_audit.keep")
    assert [(one["namespace"], one["name"]) for one in event["inputs"]] == [
        ("pgchange://airline", "commits:movement_audit/0"),
        (tables, f"{name}.public.movement"),
    ]
    assert event["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 3
    assert [(one["namespace"], one["name"]) for one in event["outputs"]] == [
        (tables, f"{name}.public.movement_audit")
    ]
    assert event["run"]["facets"]["pgchange"]["changes"] == 3


@pytest.mark.timeout(600)
def test_a_mirror_tells_of_which_column_each_of_its_own_is(told: Told) -> None:
    event = told.events["tube_replay"]
    assert event["eventType"] == "COMPLETE"
    [plane] = [one for one in event["inputs"] if one["name"].endswith(".public.plane")]
    [copy] = [one for one in event["outputs"] if one["name"].endswith(".copies.plane")]
    columns = {
        column: [(one["namespace"], one["name"], one["field"]) for one in of["inputFields"]]
        for column, of in copy["facets"]["columnLineage"]["fields"].items()
    }
    assert columns == {name: [(plane["namespace"], plane["name"], name)] for name in ("id", "tail")}


@pytest.mark.timeout(600)
def test_an_example_that_spark_submit_runs_makes_its_copy(told: Told) -> None:
    """This test runs spark-submit. The tests of the other examples share a Spark Connect server."""
    with psycopg.connect(told.db) as connection:
        assert connection.execute("table copies.plane").fetchall() == [(1, "N1"), (2, "N2")]


def told_by(db: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the examples in a new process. Return for each example the event with its batch."""
    told = folder / "told.jsonl"
    transport = {"type": "file", "log_file_path": str(told), "append": True}
    environment = {
        "AIRFLOW_CONN_AIRLINE": uri(db),
        "AIRFLOW_CONN_SPARK_DEFAULT": "spark://local%5B1%5D",
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **quick_spark.environment(folder / "conf"),
    }
    command = [sys.executable, "-c", RUN, *(str(DAGS / f"{name}.py") for name in EXAMPLES)]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return batches(told)


def batches(told: Path) -> dict[str, dict[str, Any]]:
    """Return the events with batches, by their DAG, once each DAG has such an event."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = map(json.loads, told.read_text().splitlines() if told.exists() else [])
        found = [event for event in events if "pgchange" in event["run"]["facets"]]
        by_dag = {event["job"]["name"].partition(".")[0]: event for event in found}
        if by_dag.keys() == set(EXAMPLES):
            assert len(found) == len(by_dag), "a batch was told of twice"
            return by_dag
        time.sleep(0.2)
    pytest.fail(f"no event tells of a batch: {told.read_text() if told.exists() else 'there is none'}")
