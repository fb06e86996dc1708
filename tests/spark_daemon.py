"""Spark's daemon for Python processes, which has imported what each of them needs before it forks them.

Spark's own imports nothing, so that each process compiles Spark's Python from a zip anew, for seconds.
"""

import importlib
import os
import sys

PACKAGE = "PGCHANGE_TEST_PACKAGE"
"""The variable with the path of the zip of our package for executors. Without it they get the package later."""
NEEDED = ("pyspark.worker", "pyspark.sql.conversion", "pyarrow.compute", "adbc_driver_postgresql", "psycopg")
OURS = "airflow_pgchange.spark.job"


def main() -> None:
    """Our package comes from the zip before the checkout, Spark from where its bytecode is kept."""
    here, *others = sys.path
    installed = [path for path in others if not path.endswith("pyspark.zip")]
    packages = [os.environ[PACKAGE]] if PACKAGE in os.environ else []
    sys.path[:] = [*packages, *installed, here]
    # A process that is forked has none of the threads that an import started.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in [*NEEDED, *(OURS for _ in packages)]:
        importlib.import_module(name)
    importlib.import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
