"""A daemon that imports Spark's modules for Python before it forks Spark's Python processes.

Spark's own daemon imports nothing, so each process compiles Spark's Python code from a zip, which takes seconds.
"""

import importlib
import os
import sys

PACKAGE = "PGCHANGE_TEST_PACKAGE"
"""The variable with the path of our package's zip for executors.

Without it, executors get the package from the session.
"""
NEEDED = ("pyspark.worker", "pyspark.sql.conversion", "pyarrow.compute", "adbc_driver_postgresql", "psycopg")
OURS = "airflow_pgchange.spark.job"


def main() -> None:
    """Import our package from the zip and not from the checkout, and Spark from the folder with its bytecode."""
    here, *others = sys.path
    installed = [path for path in others if not path.endswith("pyspark.zip")]
    packages = [os.environ[PACKAGE]] if PACKAGE in os.environ else []
    sys.path[:] = [*packages, *installed, here]
    # A forked process does not have the threads that an import has started.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in [*NEEDED, *(OURS for _ in packages)]:
        importlib.import_module(name)
    importlib.import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
