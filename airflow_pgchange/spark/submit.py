"""Functions to submit a batch with ``spark-submit``: the environment, the package, and options that start the JVM
faster."""

from __future__ import annotations

from pathlib import Path

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.spark import package, request, startup
from airflow_pgchange.spark.parent_process import die_with_parent
from airflow_pgchange.topology.bucket_owners import Cluster

__all__ = ["die_with_parent", "environment", "py_files", "startup_conf"]


def environment(
    batch: Batch,
    feed: Feed,
    results: str,
    source: str | None,
    manifest_path: str | Path,
    *,
    cluster: Cluster | None = None,
) -> dict[str, str]:
    """Return the environment variables of one submission. They hold no secret, so they may be logged.

    ``results``, ``source`` (None: the same) and those of ``cluster`` are libpq connection strings. They are written to
    a file beside ``manifest_path``. Only this user can read it, and the application deletes it after reading. Keep both
    in a directory that is made for one submission and removed after it. The application writes ``manifest_path`` only
    if it succeeds. ``merge.read_manifest`` reads it.
    """
    handed = request.Request(feed, batch, results, source or results, cluster, manifest=Path(manifest_path))
    return {request.REQUEST: str(request.write(handed))}


def py_files() -> str:
    """The path of a zip of this package that imports without Airflow, for ``spark-submit --py-files``."""
    return str(package.archive())


def startup_conf(*, fast_start: bool = False, spark_binary: str = "spark-submit") -> dict[str, str]:
    """Return Spark properties for ``spark-submit --conf`` that shorten the start of a local driver; none without
    ``fast_start``.

    The JVM gets a class-data archive, and settings for short runs: batches of up to some hundred thousand changes. The
    first call makes the archive, which takes about half a minute and 160 MB in this user's cache. The properties
    replace ``spark.driver.extraJavaOptions``.
    """
    return startup.conf(spark_binary) if fast_start else {}
