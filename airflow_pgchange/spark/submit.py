"""What an operator needs to submit a batch: environment, package, start-up options, and a sure end."""

from __future__ import annotations

from pathlib import Path

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.spark import package, request, startup
from airflow_pgchange.spark.parent import die_with_parent
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
    """The environment variables of one submission; they hold no secret, so they may be logged.

    ``results`` and ``source`` (None: the same) are libpq connection strings, as are those of ``cluster``. They
    go into a file beside ``manifest_path`` that only this user can read, and that the application deletes when
    it has read it: keep both in a directory that is made for one submission and removed after it. The
    application writes ``manifest_path`` when it ends well, and only then; ``merge.read_manifest`` reads it.
    """
    handed = request.Request(feed, batch, results, source or results, cluster, manifest=Path(manifest_path))
    return {request.REQUEST: str(request.write(handed))}


def py_files() -> str:
    """The path of a zip of this package that imports without Airflow, for ``spark-submit --py-files``."""
    return str(package.archive())


def startup_conf(*, fast_start: bool = False, spark_binary: str = "spark-submit") -> dict[str, str]:
    """Spark properties for ``spark-submit --conf`` that shorten the start of a local driver.

    ``fast_start`` gives the JVM a class-data archive, made at the first call (about half a minute, 160 MB in
    this user's cache), and settings that suit short runs: for batches of up to some hundred thousand changes.
    Without it there are none. They replace ``spark.driver.extraJavaOptions``.
    """
    return startup.conf(spark_binary) if fast_start else {}
