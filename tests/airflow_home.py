"""An Airflow home for the tests, which is set before Airflow is imported, and its connections."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

MINE = "PGCHANGE_TEST_HOME_OF"
DAGS = Path(__file__).parent.parent / "dags"


def prepare() -> None:
    """Set a new Airflow home for this process and its children. Each worker of a parallel run has its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    if os.environ.get(MINE) == worker:
        return
    home = tempfile.mkdtemp(prefix="pgchange-airflow-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ |= {
        MINE: worker,
        "AIRFLOW_HOME": home,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": f"{home}/logs",
    }


def uri(conninfo: str) -> str:
    """Return a database of the tests as the value of a variable ``AIRFLOW_CONN_...``."""
    server = conninfo_to_dict(conninfo)
    return f"postgres://{server['user']}@{server['host']}:{server['port']}/{server['dbname']}"
