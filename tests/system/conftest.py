from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests import spark_server
from tests.airflow_home import DAGS, prepare

prepare()


@pytest.fixture(scope="session")
def example(metadata: None) -> Callable[[str], Any]:
    """The DAGs of ``dags/`` by their ids, known to Airflow."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

    bag = DagBag(str(DAGS))
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)

    def parsed_anew(dag_id: str) -> Any:
        """Not the DAG of another test: a task keeps the parameters of the run that it had last."""
        return DagBag(bag.dags[dag_id].fileloc).dags[dag_id]

    return parsed_anew


@pytest.fixture
def connect_server(monkeypatch: pytest.MonkeyPatch) -> spark_server.SharedServer:
    """The run's Spark Connect server, under a user of this test alone, behind Airflow's connection ``spark_default``."""
    server = spark_server.as_user_of_its_own()
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(server.connection))
    return server
