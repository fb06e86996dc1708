"""Fixtures that several modules share: tests of operators, sensors, the page and the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests import page
from tests.airflow_home import uri
from tests.command_line import Command, command
from tests.ledger import Connect, make_ledger, writer
from tests.submit_operator import MakeOperator, operators


@pytest.fixture
def conn_id(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Airflow connection to a database with a tracked ledger and an audit table."""
    make_ledger(connect())
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return "airline"


@pytest.fixture(scope="session")
def airflow(metadata: None, tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """Airflow's API, in a process whose Airflow has stored DAGs that name feeds."""
    folder = tmp_path_factory.mktemp("page")
    page.prepare(folder)
    page.parse(folder)
    return page.served()


@pytest.fixture
def write(conn_id: str, connect: Connect) -> Callable[[int], None]:
    """Insert this number of rows in one transaction."""
    return writer(connect())


@pytest.fixture
def operator(db: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeOperator:
    """A Spark operator over five changes. The test gives its application as text."""
    return operators(db, connect, tmp_path, monkeypatch)


@pytest.fixture
def pgchange(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``airflow-pgchange`` with arguments. Return its output, read as JSON."""
    return command(capsys)
