"""Airflow's metadata database, for tests that need it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite import room

AIRFLOW = Path(sys.executable).parent / "airflow"


@pytest.fixture(scope="session")
def metadata() -> None:
    """Airflow's own database, migrated."""
    take_migrated()


def take_migrated() -> None:
    """Let Airflow use a migrated database: a copy of a template that the first process of the run creates. An earlier
    test may have opened an empty database, and SQLite would still read the log of that database."""
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
