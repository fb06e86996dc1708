"""The first tutorial, step by step: its commands, statements and DAG have the output that the page shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg
import pytest
from packaging.version import Version
from psycopg.conninfo import make_conninfo

from tests.airflow_home import uri
from tests.airflow_metadata import take_migrated
from tests.conftest import Role
from tests.following import Reader, cells
from tests.readme import ROOT, TUTORIAL, blocks

TEXT = (ROOT / TUTORIAL).read_text()
(SAVED,) = re.findall(r"save the file as\s`([^`]+)`", TEXT)


class Newcomer(Reader):
    """A reader of the tutorial, who mends the DAG before they send a letter again."""

    def step(self, number: int) -> None:
        self.follow(TEXT.split(f"\n## {number}. ")[1].split("\n## ")[0])

    def _sh(self, example: str) -> str:
        """Run commands. The output names the role as the page does."""
        if " redrive " in example:
            self._mend()
        return super()._sh(example).replace(self.database.info.user, "shop")

    def _mend(self) -> None:
        ((right, wrong),) = re.findall(r"Mend the DAG: write `([^`]+)` instead of `([^`]+)`", TEXT)
        (file,) = self.files
        text = file.read_text()
        assert text.count(wrong) == 1
        file.write_text(text.replace(wrong, right))


@pytest.fixture
def reader(
    bare_db: str,
    role: Callable[[str], Role],
    connect_to: Callable[..., psycopg.Connection[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Newcomer]:
    """A reader whose connection ``shop`` leads to this test's database, as a role that owns it and has no other right.

    Airflow's database is new, because ``status`` would also show a DAG of the same name that another test has run.
    """
    take_migrated()
    superuser, owner = connect_to(bare_db), role("shop").name
    name = superuser.info.dbname
    superuser.execute(f"alter database {name} owner to {owner}")
    conninfo = make_conninfo(bare_db, user=owner)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(conninfo))
    saved = tmp_path / Path(SAVED).name
    yield Newcomer(connect_to(conninfo), tmp_path, lambda: capsys.readouterr().out, [(SAVED, str(saved))])
    superuser.execute(f"drop owned by {owner} cascade; alter database {name} owner to current_user")


@pytest.mark.skipif(
    Version(version("apache-airflow")) < Version("3.3"), reason="the tutorial shows what Airflow 3.3 prints"
)
@pytest.mark.hstore
def test_the_tutorial_shows_what_its_reader_sees(reader: Newcomer) -> None:
    """Takes seconds: Airflow is imported, and all schemas are installed and removed."""
    for step in range(1, 11):
        reader.step(step)
    assert reader.failures == [psycopg.errors.NotNullViolation]
    (logged,) = [text for text in blocks("text", TUTORIAL) if "committed after" in text]
    assert {line for (line,) in cells(logged)} <= {line for (line,) in cells("\n".join(reader.logged))}
