"""The command that maintains a database in a loop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import psycopg
import pytest

from airflow_pgchange.admin import maintenance_loop
from tests.command_line import parsed


class Rests(list[float]):
    """Replaces the sleep between two runs, and records its seconds. After the last run it stops the process."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def rest(self, seconds: float) -> None:
        self.append(seconds)
        if len(self) == self.last:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Rests]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    caplog.set_level(logging.INFO)
    rests = Rests(3)
    monkeypatch.setattr(maintenance_loop, "sleep", rests.rest)
    yield rests
    signal.signal(signal.SIGTERM, before)


def maintain(*arguments: str) -> None:
    args = parsed("maintain", *arguments)
    args.func(args)


def test_a_database_is_maintained_again_and_again_until_the_process_is_to_stop(
    db: str, rests: Rests, caplog: pytest.LogCaptureFixture
) -> None:
    maintain("--dsn", db, "--every", "1 min", "--retention-bytes", "1 GB")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("airflow_pgchange")]
    assert [line.split()[0] for line in lines] == ["maintained"] * 3 + ["stopped"]
    assert all(0 < seconds <= 60 for seconds in rests)


def test_a_server_that_is_away_is_tried_less_and_less_often(
    db: str, rests: Rests, caplog: pytest.LogCaptureFixture
) -> None:
    maintain("--dsn", f"{db} dbname=nobody_made_it", "--every", "1 min")
    assert [round(seconds, -1) for seconds in rests] == [120, 240, 480]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 3


def test_of_two_processes_one_maintains_a_database(
    db: str, connection: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with maintenance_loop._alone(db) as alone:
        maintenance_loop.maintain_once(db)
        xmin = "select backend_xmin, backend_xid from pg_stat_activity where state = 'idle in transaction'"
        assert connection.execute(xmin).fetchall() == [(None, None)]
    assert alone
    assert "another process maintains this database" in caplog.text
