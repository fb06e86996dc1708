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
    """The DAGs of ``dags/`` by their ids, known to Airflow."""
    bag = stored(DAGS)

    def parsed_anew(dag_id: str) -> Any:
        """Not the DAG of another test: a task keeps the parameters of the run that it had last."""
        return bag_of(bag.dags[dag_id].fileloc).dags[dag_id]

    return parsed_anew


@pytest.fixture
def connect_server(monkeypatch: pytest.MonkeyPatch) -> spark_server.SharedServer:
    """The run's Spark Connect server, under a user of this test alone, behind Airflow's connection ``spark_default``."""
    server = spark_server.as_user_of_its_own()
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(server.connection))
    return server
