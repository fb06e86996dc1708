from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests import spark_server
from tests.airflow_home import DAGS, prepare
from tests.dag_bags import bag_of, stored

prepare()


@pytest.fixture(scope="session")
def example(metadata: None) -> Callable[[str], Any]:
    """A function that returns a DAG of ``dags/`` by its id. Airflow has stored the DAGs."""
    bag = stored(DAGS)

    def parsed_anew(dag_id: str) -> Any:
        """Parse the file of the DAG again: a task keeps the parameters of its last run, which may be from another
        test."""
        return bag_of(bag.dags[dag_id].fileloc).dags[dag_id]

    return parsed_anew


@pytest.fixture
def connect_server(monkeypatch: pytest.MonkeyPatch) -> spark_server.SharedServer:
    """The run's Spark Connect server, with a user for this test alone.

    Airflow's connection ``spark_default`` leads to it.
    """
    server = spark_server.as_user_of_its_own()
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(server.connection))
    return server
