"""Spark for jobs of a few rows: what it does to be quick with many costs more than all the rest of them."""

from __future__ import annotations

from pathlib import Path

from airflow_pgchange.spark import submit
from airflow_pgchange.spark.startup import SHORT_RUN
from tests.spark_daemon import PACKAGE

ROOT = Path(__file__).parents[1]
UNVERIFIED = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""Java checks the classes of Spark's jars as it loads them, for a quarter of the start."""
JAVA = " ".join([*SHORT_RUN, *UNVERIFIED])
QUICK = {
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
}
"""Over a few rows it costs more to compile a query than to interpret it; `tests/system` has a Spark as it comes, too."""
DAEMON = {"spark.python.daemon.module": "tests.spark_daemon"}
"""For a local master, with the environment of ``environment``."""


def environment(folder: Path) -> dict[str, str]:
    """Variables under which a ``spark-submit`` with a local master is quick, by a file of settings in a folder."""
    folder.mkdir(exist_ok=True)
    settings = "".join(f"{name} {value}\n" for name, value in (QUICK | DAEMON).items())
    (folder / "spark-defaults.conf").write_text(settings)
    return {"SPARK_CONF_DIR": str(folder), "PYTHONPATH": str(ROOT), PACKAGE: submit.py_files()}
