"""OpenLineage's own provider, listening while Airflow runs a DAG."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests import quick_spark
from tests.airflow_home import DAGS, uri

RUN = """
import sys
from airflow.dag_processing.dagbag import DagBag
DagBag(sys.argv[1]).dags[sys.argv[2]].test()
"""
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


@pytest.mark.timeout(300)
def test_a_task_tells_of_its_batch(
    example: Callable[[str], Any], db: str, connect: Callable[..., psycopg.Connection[Any]], tmp_path: Path
) -> None:
    """Dozens of seconds: a process of its own runs a DAG, and the listener's own one tells of it."""
    connect().execute(TABLES)
    (event,) = told_by("movement_audit", db, tmp_path)
    server = conninfo_to_dict(db)
    tables, database = f"postgres://{server['host']}:{server['port']}", server["dbname"]
    assert (event["eventType"], event["job"]["name"]) == ("COMPLETE", "movement_audit.keep")
    assert [(one["namespace"], one["name"]) for one in event["inputs"]] == [
        ("pgchange://airline", "movement_audit/0"),
        (tables, f"{database}.public.movement"),
    ]
    assert event["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] == 3
    assert [(one["namespace"], one["name"]) for one in event["outputs"]] == [
        (tables, f"{database}.public.movement_audit")
    ]
    assert event["run"]["facets"]["pgchange"]["changes"] == 3


@pytest.mark.timeout(600)
def test_a_mirror_tells_of_which_column_each_of_its_own_is(
    example: Callable[[str], Any], db: str, connect: Callable[..., psycopg.Connection[Any]], tmp_path: Path
) -> None:
    """Dozens of seconds: a process of its own runs a DAG, with a JVM, and the listener's own one tells of it."""
    connection = connect()
    connection.execute(COPIES)
    (event,) = told_by("tube_replay", db, tmp_path)
    assert connection.execute("table copies.plane").fetchall() == [(1, "N1"), (2, "N2")]
    assert event["eventType"] == "COMPLETE"
    [plane] = [one for one in event["inputs"] if one["name"].endswith(".public.plane")]
    [copy] = [one for one in event["outputs"] if one["name"].endswith(".copies.plane")]
    columns = {
        column: [(one["namespace"], one["name"], one["field"]) for one in of["inputFields"]]
        for column, of in copy["facets"]["columnLineage"]["fields"].items()
    }
    assert columns == {name: [(plane["namespace"], plane["name"], name)] for name in ("id", "tail")}


def told_by(dag_id: str, db: str, folder: Path) -> list[dict[str, Any]]:
    """The events that tell of batches, of a run of an example in a process of its own."""
    told = folder / "told.jsonl"
    transport = {"type": "file", "log_file_path": str(told), "append": True}
    environment = {
        "AIRFLOW_CONN_AIRLINE": uri(db),
        "AIRFLOW_CONN_SPARK_DEFAULT": "spark://local%5B1%5D",
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **quick_spark.environment(folder / "conf"),
    }
    command = [sys.executable, "-c", RUN, str(DAGS / f"{dag_id}.py"), dag_id]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return batches(told)


def batches(told: Path) -> list[dict[str, Any]]:
    """The events that tell of batches, once there are any."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = map(json.loads, told.read_text().splitlines() if told.exists() else [])
        if found := [event for event in events if "pgchange" in event["run"]["facets"]]:
            return found
        time.sleep(0.2)
    pytest.fail(f"no event tells of a batch: {told.read_text() if told.exists() else 'there is none'}")
