from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_home import DAGS, prepare

prepare()

AIRFLOW = Path(sys.executable).parent / "airflow"


@pytest.fixture(scope="session")
def metadata() -> None:
    """Airflow's own database, migrated."""
    subprocess.run([AIRFLOW, "db", "migrate"], check=True, capture_output=True)


@pytest.fixture(scope="session")
def example(metadata: None) -> Callable[[str], Any]:
    """The DAGs of ``dags/`` by their ids, known to Airflow."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

    bag = DagBag(str(DAGS))
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    return bag.dags.__getitem__
