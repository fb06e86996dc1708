"""Settings that make Spark fast for jobs of a few rows, where preparations for many rows would take most of the time."""

from __future__ import annotations

from pathlib import Path

from airflow_pgchange.spark import submit
from airflow_pgchange.spark.startup import SHORT_RUN
from tests.spark_daemon import PACKAGE

ROOT = Path(__file__).parents[1]
UNVERIFIED = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""Java verifies the classes of Spark's jars when it loads them, which takes a quarter of the start."""
JAVA = " ".join([*SHORT_RUN, *UNVERIFIED])
QUICK = {
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""Interpret queries: for a few rows, compiling them takes longer. `tests/system` also runs Spark with its own defaults.
"""
DAEMON = {"spark.python.daemon.module": "tests.spark_daemon"}
"""The setting for Python processes of a local master. It needs the variables that ``environment`` returns."""


def environment(folder: Path) -> dict[str, str]:
    """Return variables that make ``spark-submit`` with a local master fast. A file of settings is written into the
    folder."""
    folder.mkdir(exist_ok=True)
    settings = "".join(f"{name} {value}\n" for name, value in (QUICK | DAEMON).items())
    (folder / "spark-defaults.conf").write_text(settings)
    return {"SPARK_CONF_DIR": str(folder), "PYTHONPATH": str(ROOT), PACKAGE: submit.py_files()}
