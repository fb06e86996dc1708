from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_home import DAGS, prepare
from tests.suite import room

prepare()

AIRFLOW = Path(sys.executable).parent / "airflow"


@pytest.fixture(scope="session")
def metadata() -> None:
    """Airflow's own database, migrated: a copy of one that whichever process of the run comes first makes.

    A test before may have opened an empty one, which SQLite would go on reading from its log.
    """
    from airflow import settings

    folder = room.take() / "migrated"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = folder.with_suffix(".part")
            command = [AIRFLOW, "db", "migrate"]
            subprocess.run(
                command, check=True, capture_output=True, env=os.environ | {"AIRFLOW_HOME": str(making)}
            )
            making.rename(folder)
    settings.dispose_orm(do_log=False)
    home = Path(os.environ["AIRFLOW_HOME"])
    for empty in home.glob("airflow.db*"):
        empty.unlink()
    shutil.copy(folder / "airflow.db", home)
    settings.configure_orm()


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
