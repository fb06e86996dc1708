"""Bags of DAGs, as Airflow's DAG processor reads and stores them. Their module moved in Airflow 3.3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODULES = ("airflow.dag_processing.dagbag", "airflow.models.dagbag")


def bag_of(path: str | Path) -> Any:
    """Return the bag of the DAGs of a file or a folder."""
    return _moved("DagBag")(str(path))


def stored(path: str | Path) -> Any:
    """Return the bag of the DAGs of a file or a folder, and store the DAGs in Airflow's metadata database."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager

    bag = bag_of(path)
    DagBundlesManager().sync_bundles_to_db()
    _moved("sync_bag_to_db")(bag, "dags-folder", None)
    return bag


def _moved(name: str) -> Any:
    # Imported here, because a test sets Airflow's home before it imports Airflow.
    from airflow_pgchange.utils.compat import moved

    return moved(name, *MODULES)
