"""The first tutorial, step by step: its commands, statements and DAG have the output that the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from airflow.cli.cli_parser import get_parser
from packaging.version import Version
from psycopg.conninfo import make_conninfo

from tests.airflow_home import uri
from tests.airflow_metadata import take_migrated
from tests.command_line import parsed
from tests.conftest import Role
from tests.ledger import run
from tests.readme import FENCE, ROOT, TUTORIAL, blocks, statements

TEXT = (ROOT / TUTORIAL).read_text()
(SAVED,) = re.findall(r"save the file as\s`([^`]+)`", TEXT)
ELSEWHERE = {".", "export", "pip", "psql", "python3", "rm"}
"""Programs of others, and commands of the shell, that this test leaves out."""
CHANGING = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\b\d+ s\b|\b\d+\.\d+\b")
"""Ids, times, ages and durations differ from run to run."""
RULE = re.compile(r"[-+= ]*|\(\d+ rows?\)")


def cells(shown: str) -> list[list[str]]:
    """Return the cells of a table in the output of ``psql`` or ``airflow``, or the lines of another text.

    A row whose first cell is empty continues the row above: where its text breaks depends on the lengths of times.
    """
    rows: list[list[str]] = []
    for line in shown.splitlines():
        if not RULE.fullmatch(line):
            row = [CHANGING.sub("...", cell.strip()) for cell in line.split("|")]
            if rows and len(row) > 1 and not row[0]:
                rows[-1] = [f"{above} {below}".strip() for above, below in zip(rows[-1], row, strict=True)]
            else:
                rows.append(row)
    return rows


def examples(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Each example of a text with its language, and the text that the page shows behind it."""
    found: Sequence[tuple[str, str]] = FENCE.findall(text)
    for (language, example), (following, shown) in zip_longest(found, found[1:], fillvalue=("", "")):
        if language != "text":
            yield language, example, shown if following == "text" else None


class Reader:
    """A person who follows the tutorial. Before they look at a result, Airflow's runs of the DAG have ended."""

    def __init__(self, database: psycopg.Connection[Any], home: Path, printed: Callable[[], str]) -> None:
        self.database = database
        self.file = home / "balances.py"
        self.failures: list[type[Exception]] = []
        self.logged: list[str] = []
        self.notices: list[str] = []
        database.add_notice_handler(lambda notice: self.notices.append(f"NOTICE:  {notice.message_primary}"))
        self._printed = printed

    def follow(self, step: int) -> None:
        """Do a step, and compare its output."""
        text = TEXT.split(f"\n## {step}. ")[1].split("\n## ")[0]
        for language, example, shown in examples(text):
            told = getattr(self, f"_{language}")(example)
            assert shown is None or cells(told) == cells(shown)
        for notice in re.findall(r"`(NOTICE:  [^`]+)`", text):
            assert notice in self.notices

    def _sh(self, example: str) -> str:
        """Run our commands, and check that Airflow has the others. The output names the role as the page does."""
        if " status " in example:
            self._airflow_runs()
        if " redrive " in example:
            self._mend()
        self._printed()
        for line in example.splitlines():
            program, *arguments = shlex.split(line.replace(SAVED, str(self.file)))
            if program == "airflow-pgchange" and "--help" not in arguments:
                args = parsed(*arguments)
                args.func(args)
            elif program == "airflow":
                args = get_parser().parse_args(arguments)
                if arguments[0] == "connections":
                    args.func(args)
            else:
                assert program in {"airflow-pgchange", *ELSEWHERE}
        return self._printed().replace(self.database.info.user, "shop")

    def _sql(self, example: str) -> str:
        """Run statements, and show the rows of the last statement with rows, with ``|`` between cells as in ``psql``."""
        if "from public.balance" in example:
            self._airflow_runs()
        shown = ""
        for statement in statements(example):
            cursor = self.database.execute(statement)
            if cursor.description:
                rows = [[column.name for column in cursor.description], *map(list, cursor.fetchall())]
                shown = "\n".join("|".join(map(str, row)) for row in rows)
        return shown

    def _python(self, example: str) -> str:
        self.file.write_text(example)
        return ""

    def _mend(self) -> None:
        ((right, wrong),) = re.findall(r"Mend the DAG: write `([^`]+)` instead of `([^`]+)`", TEXT)
        text = self.file.read_text()
        assert text.count(wrong) == 1
        self.file.write_text(text.replace(wrong, right))

    def _airflow_runs(self) -> None:
        """Run the DAG until nothing is ready, or until it fails."""
        names: dict[str, Any] = {}
        exec(self.file.read_text(), names)
        task = names["balances"]().get_task("add")
        with patch.object(task.log, "info") as info:
            try:
                while run(task)["changes"]:
                    pass
            except psycopg.Error as error:
                self.failures.append(type(error))
        self.logged += [call.args[0] % call.args[1:] for call in info.call_args_list]


@pytest.fixture
def reader(
    bare_db: str,
    role: Callable[[str], Role],
    connect_to: Callable[..., psycopg.Connection[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Reader]:
    """A reader whose connection ``shop`` leads to this test's database, as a role that owns it and has no other right.

    Airflow's database is new, because ``status`` would also show a DAG of the same name that another test has run.
    """
    take_migrated()
    superuser, owner = connect_to(bare_db), role("shop").name
    name = superuser.info.dbname
    superuser.execute(f"alter database {name} owner to {owner}")
    conninfo = make_conninfo(bare_db, user=owner)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(conninfo))
    yield Reader(connect_to(conninfo), tmp_path, lambda: capsys.readouterr().out)
    superuser.execute(f"drop owned by {owner} cascade; alter database {name} owner to current_user")


@pytest.mark.skipif(
    Version(version("apache-airflow")) < Version("3.3"), reason="the tutorial shows what Airflow 3.3 prints"
)
@pytest.mark.hstore
def test_the_tutorial_shows_what_its_reader_sees(reader: Reader) -> None:
    """Takes seconds: Airflow is imported, and all schemas are installed and removed."""
    for step in range(1, 11):
        reader.follow(step)
    assert reader.failures == [psycopg.errors.NotNullViolation]
    (logged,) = [text for text in blocks("text", TUTORIAL) if "committed after" in text]
    assert {line for (line,) in cells(logged)} <= {line for (line,) in cells("\n".join(reader.logged))}
