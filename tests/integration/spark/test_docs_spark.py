"""The examples of the guide to Spark, and the DAG of the README, run unchanged."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest

from airflow_pgchange.feeds import TubeFeed
from airflow_pgchange.spark.job import SMALL, Job
from airflow_pgchange.spark.package import EXECUTOR_PACKAGES
from tests import airflow_home
from tests.readme import ROOT, blocks, statements, track_payments
from tests.spark_session import batch_of
from tests.suite.parsing import syntax
from tests.suite.processes import said_with

airflow_home.prepare()

PAGE = "docs/how-to/spark.md"
ADDED = {"README.md": [("ann", 70), ("bob", 50)], PAGE: [("ann", 100), ("bob", 50)]}
"""The balances after the tutorial's payments. The example of the guide leaves out payments with negative amounts."""


def test_the_dag_of_the_guide_has_its_function_as_a_task() -> None:
    """Takes seconds: Airflow is imported."""
    names = {}
    exec(blocks("python", PAGE)[1], names)
    (task,) = names["balances"]().tasks
    assert (task.custom_operator_name, task.task_id, task.op_kwargs) == (
        "@task.pgchange_spark",
        "balance",
        {"least": 0},
    )


@pytest.mark.parametrize(
    ("page", "block", "arguments"), [("README.md", 0, {}), (PAGE, 1, {"least": 0})], ids=["README", "guide"]
)
def test_the_function_of_a_dag_adds_each_payment(db, connect, page: str, block: int, arguments) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    track_payments(connection)
    names = {}
    exec(blocks("python", page)[block], names)
    (task,) = names["balances"]().tasks
    with batch_of(names["PAYMENTS"], db) as job:
        task.python_callable(job, **arguments)
    balances = connection.execute("select account, cents from public.balance order by account").fetchall()
    assert balances == ADDED[page]


def test_the_copy_of_the_guide_follows_its_table(db, connect, monkeypatch) -> None:
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    for statement in statements(blocks("sql", "docs/how-to/tubes.md")[0]):
        connection.execute(statement)
    connection.execute(
        "alter table public.customer add born date; insert into public.customer values (1, 'ann', '1990-01-01')"
    )
    with batch_of(TubeFeed("copies"), db) as job:
        monkeypatch.setattr("airflow_pgchange.batch_jobs", lambda: [job])
        exec(blocks("python", PAGE)[3], {})
    assert connection.execute("select born::text from copies.customer").fetchall() == [("1990-01-01",)]


@pytest.mark.parametrize("block", [0, 2], ids=["one batch", "batch after batch"])
def test_the_applications_of_the_guide_use_what_a_job_has(block: int) -> None:
    tree = syntax(blocks("python", PAGE)[block])
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "job"
    }
    assert used == {"rows", "merge"} <= set(dir(Job))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), {})


def test_the_guide_says_what_executors_need_and_what_needs_none() -> None:
    text = (ROOT / PAGE).read_text()
    assert [name for name in EXECUTOR_PACKAGES if f"`{name}`" not in text] == []
    assert f"fewer than {SMALL:,} changes" in text


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.release("seconds: all of PySpark is compiled"))]
)
def test_the_commands_of_the_guide_put_bytecode_into_the_zip_that_executors_import(tmp_path, whole) -> None:
    """In a release this is Spark's own zip, in other runs a zip with only the module that starts on executors."""
    library = tmp_path / "python" / "lib"
    library.mkdir(parents=True)
    zipped = Path(shutil.copy(Path(str(pyspark.__file__)).parent / "python/lib/pyspark.zip", library))
    if not whole:
        with zipfile.ZipFile(zipped, "w") as archive:
            for module in ("__init__", "daemon"):
                archive.writestr(f"pyspark/{module}.py", "")
    (commands,) = blocks("sh", PAGE)
    environment = os.environ | {
        "SPARK_HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    subprocess.run(["sh", "-ec", commands], check=True, env=environment)
    code = "import pyspark.daemon; print(pyspark.daemon.__file__)"
    assert said_with(zipped, code, tmp_path).strip() == f"{zipped}/pyspark/daemon.pyc"
