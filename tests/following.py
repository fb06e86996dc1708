"""Follow a page as its reader does: run its examples in their order, and compare the output with the text behind each.

An example in Python is the file of a DAG, which the text before it names. Its tasks run before the reader looks at
results.
"""

from __future__ import annotations

import configparser
import functools
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any
from unittest.mock import patch

import psycopg
from airflow.cli.cli_parser import get_parser
from airflow.sdk import DAG
from airflow.sdk.definitions.mappedoperator import MappedOperator

from tests.command_line import parsed
from tests.readme import FENCE, statements

ELSEWHERE = {".", "createdb", "export", "pg_dump", "pg_dumpall", "pg_restore", "pip", "psql", "python3", "rm"}
"""Programs that are not ours, and commands of the shell. They are not run."""
CHANGING = re.compile(
    r"[0-9a-f]{8}-[0-9a-f-]{27}|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\b\d+ (?:ms|s)\b|\b\d+\.\d+\b"
)
"""Parts of the output that differ from run to run: ids, times, ages and durations."""
SAVED = re.compile(r"(\w+\.py)`")
"""Names of files in a text, with or without a folder."""
RULE = re.compile(r"[-+= ]*|\(\d+ rows?\)")
BY_TIME = (NoneType, str, timedelta)
"""Schedules of DAGs that run by hand or by the clock."""
ROUNDS = 10
"""The maximum number of runs of each DAG until nothing is ready."""


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
    """Return each example of a text: its language, its content, and the output that the page shows after it."""
    found: Sequence[tuple[str, str]] = FENCE.findall(text)
    for (language, example), (following, shown) in zip_longest(found, found[1:], fillvalue=("", "")):
        if language != "text":
            yield language, example, shown if following == "text" else None


def dags(file: Path) -> Sequence[DAG]:
    """Return the DAGs that a file creates by decorated functions."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(file.read_text(), names)
    by_functions = [
        made()
        for made in names.values()
        if isinstance(made, FunctionType) and made.__module__ == "page" and hasattr(made, "__wrapped__")
    ]
    return [*by_functions, *(made for made in names.values() if isinstance(made, DAG))]


def _as_psql(value: Any) -> str:
    """Write a value as ``psql`` does."""
    if isinstance(value, list):
        return f"{{{','.join(map(_as_psql, value))}}}"
    return "" if value is None else str(value)


class Reader:
    """A person who follows a page. Before they look at a result, Airflow's runs of the DAGs have ended.

    ``replaced``: texts of the page, and what stands for each of them here. ``attempts``: how often a DAG whose run
    fails runs again before the reader looks.
    """

    attempts = 1

    def __init__(
        self,
        database: psycopg.Connection[Any],
        folder: Path,
        printed: Callable[[], str],
        replaced: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.database = database
        self.folder = folder
        self.files: list[Path] = []
        self.failures: list[type[Exception]] = []
        self.logged: list[str] = []
        self.notices: list[str] = []
        database.add_notice_handler(lambda notice: self.notices.append(f"NOTICE:  {notice.message_primary}"))
        self._named: list[str] = []
        self._session: dict[str, Any] = {}
        self._printed = printed
        self._replaced = replaced

    def follow(self, text: str) -> None:
        """Do what a text says, and compare the output and the notices that it names."""
        for language, example, shown in examples(text):
            if shown is not None and self.looks(example):
                self.wait()
            self._named = SAVED.findall(text.partition(example)[0])
            told = getattr(self, f"_{language}")(self._here(example))
            if shown is not None:
                assert cells(told) == cells(self._here(shown)), told
        for notice in re.findall(r"`(NOTICE:  [^`]+)`", text):
            assert notice in self.notices

    def looks(self, example: str) -> bool:
        """Whether an example shows results of the DAGs, so that they must have run before."""
        return example.startswith(("select", "rows = ")) or " status " in example

    def wait(self) -> None:
        """Run the DAGs on assets, until nothing is left or they have failed as often as ``attempts`` says."""
        made = [dag for file in self.files for dag in dags(file) if not isinstance(dag.schedule, BY_TIME)]
        failures = 0
        for _ in range(ROUNDS if made else 0):
            try:
                for dag in made:
                    self._run(dag)
            except (psycopg.Error, LookupError) as error:
                failures += 1
                self.failures.append(type(error))
                if failures == self.attempts:
                    return
                continue
            if not self._left():
                return
            time.sleep(0.02)

    def trigger(self, dag_id: str, form: dict[str, Any]) -> None:
        """Run the tasks of a DAG by hand. A mapped task runs for each item that the task before it returned."""
        (dag,) = [dag for file in self.files for dag in dags(file) if dag.dag_id == dag_id]
        context = {"params": dag.params.dump() | form}
        returned: Any = None
        for task in dag.topological_sort():
            runs = [task]
            if isinstance(task, MappedOperator):
                runs = [task.unmap(dict.fromkeys(task.expand_input.value, item)) for item in returned]
            for each in runs:
                each.render_template_fields(context)
                returned = self._execute(each, context)

    def _run(self, dag: DAG) -> None:
        for task in dag.topological_sort():
            self._execute(task)

    def _execute(self, task: Any, context: dict[str, Any] | None = None) -> Any:
        with patch.object(task.log, "info") as info:
            try:
                return task.execute(context or {})
            finally:
                self.logged += [call.args[0] % call.args[1:] for call in info.call_args_list]

    def _left(self) -> bool:
        """Whether changes are ready, or will be."""
        left = "select coalesce(sum(ready + waiting), 0) > 0 from pgchange.status()"
        return self.database.execute(left).fetchone() == (True,)

    def _here(self, text: str) -> str:
        return functools.reduce(lambda made, pair: made.replace(*pair), self._replaced, text)

    def _sh(self, example: str) -> str:
        """Run our commands, and check that Airflow has the others. The output names the role as the page does."""
        self._printed()
        for line in example.splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "airflow-pgchange" and "--help" not in arguments:
                args = parsed(*arguments)
                args.func(args)
            elif program == "airflow":
                args = get_parser().parse_args(arguments)
                if arguments[0] == "connections":
                    args.func(args)
                elif arguments[:2] == ["dags", "trigger"]:
                    self.trigger(args.dag_id, json.loads(args.conf))
            else:
                assert program in {"airflow-pgchange", "", *ELSEWHERE}
        return self._printed().replace(f"by {self.database.info.user}", "by shop")

    def _sql(self, example: str) -> str:
        """Run statements, and show the rows of the last statement with rows, with ``|`` between cells as in ``psql``."""
        shown = ""
        for statement in statements(example):
            cursor = self.database.execute(statement)
            if cursor.description:
                rows = [[column.name for column in cursor.description], *map(list, cursor.fetchall())]
                shown = "\n".join("|".join(map(_as_psql, row)) for row in rows)
        return shown

    def _ini(self, example: str) -> str:
        """Check that settings can be read."""
        configparser.ConfigParser().read_string(example)
        return ""

    def _py(self, example: str) -> str:
        """Run a part of a session in Python, and return its output."""
        self._printed()
        exec(example, self._session)
        return self._printed()

    def _python(self, example: str) -> str:
        """Save a file of DAGs under the last name that the page has mentioned."""
        file = self.folder / self._named[-1]
        file.write_text(example)
        self.files = [*dict.fromkeys([*self.files, file])]
        return ""
