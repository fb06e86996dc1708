"""Prepare Spark sessions for a batch, in a driver of their own or on a Spark Connect server."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pyspark.version
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from airflow_pgchange.errors import InvalidArgument, PermissionDenied, ServerUnavailable
from airflow_pgchange.spark import package
from airflow_pgchange.spark.installed_versions import check_pair, sends_rows

if TYPE_CHECKING:
    from pyspark.sql.connect.shell.progress import StageInfo

PATIENCE = 60.0
"""Seconds for a server to answer."""
RETRIES = 6
"""The number of retries if a server that has answered before does not answer: they take about a minute. Spark's client
would retry for ten minutes by default."""

_shipped: WeakKeyDictionary[SparkSession, set[Path]] = WeakKeyDictionary()


def prepare(remote: str, conf: Mapping[str, str], py_files: Sequence[str]) -> None:
    """Open the session of the application on a Connect server, with its settings and files, as ``spark-submit`` would.

    The files are available to the server's Python and to this one. ``remote`` is the server's connection string. Raises
    InvalidArgument for a setting or file, PermissionDenied if the server refuses the token, and ServerUnavailable if it
    does not answer. If the server goes away later, a request fails within minutes.
    """
    # Import here only: it takes a second, and the process that submits a batch does not need it.
    from pyspark.sql.connect.client.retries import DefaultPolicy  # noqa: PLC0415

    _reach(remote)
    spark = SparkSession.builder.getOrCreate()
    spark.client.set_retry_policies([DefaultPolicy(max_retries=RETRIES)])
    _sign_in(spark)
    for name, value in conf.items():
        try:
            spark.conf.set(name, value)
        except AnalysisException as error:
            raise InvalidArgument(
                f"{name} cannot be set for a session of a Spark Connect server. Set it in the server's configuration, "
                f"and leave it out of the operator's conf"
            ) from error
    for file in py_files:
        if not Path(file).is_file():
            raise InvalidArgument(f"py_files: there is no file {file} on this machine")
        spark.addArtifacts(file, pyfile=True)
        if file.endswith(".py"):
            sys.path.append(str(Path(file).resolve().parent))


def _sign_in(spark: SparkSession) -> None:
    """Make the first request. Raises PermissionDenied if the server refuses the token."""
    try:
        _ = spark.version
    except PySparkException as error:
        # Spark's client shows a refused token only in the text of the error.
        if "UNAUTHENTICATED" not in str(error):
            raise
        raise PermissionDenied(
            "the Spark Connect server refused the token of the connection: correct the connection's password, which "
            "is the server's SPARK_CONNECT_AUTHENTICATE_TOKEN"
        ) from error


def opened() -> SparkSession:
    """Return the session of this application. Raises VersionsDiffer if the server's Spark and the installed Spark
    cannot work together."""
    spark = SparkSession.builder.appName("pgchange").getOrCreate()
    if is_remote():
        check_pair(pyspark.version.__version__, spark.version)
    return spark


def makes_frames(spark: SparkSession) -> bool:
    """Whether the session can create a frame from rows in this process."""
    return not is_remote() or sends_rows(pyspark.version.__version__, spark.version)


def ship(spark: SparkSession) -> None:
    """Send this package to the server's Python processes, once for a session. A local driver has it already."""
    if not is_remote():
        return
    archive, shipped = package.archive(), _shipped.setdefault(spark, set())
    if archive not in shipped:
        spark.addArtifacts(str(archive), pyfile=True)
        shipped.add(archive)


@contextmanager
def followed(spark: SparkSession, note: Callable[[str, str], None]) -> Iterator[None]:
    """While the block runs, note how many stages of its queries are done, as a Connect server reports them."""
    if not is_remote():
        yield
        return

    def report(stages: Iterable[StageInfo] | None, **_: object) -> None:
        if listed := list(stages or ()):
            note("stages", f"{sum(stage.done for stage in listed)} of {len(listed)} done")

    spark.registerProgressHandler(report)  # type: ignore[arg-type]
    try:
        yield
    finally:
        spark.removeProgressHandler(report)  # type: ignore[arg-type]


def parallelism(spark: SparkSession) -> int:
    """Return the default number of partitions of the session, read from a plan that is not executed."""
    plan = io.StringIO()
    with redirect_stdout(plan):
        spark.range(1).explain()
    splits = re.search(r"splits=(\d+)", plan.getvalue())
    return int(splits[1]) if splits else 1


def _reach(remote: str) -> None:
    """Wait until the server answers. Its client would wait for ten minutes and log nothing."""
    import grpc  # noqa: PLC0415
    from pyspark.sql.connect.client import DefaultChannelBuilder  # noqa: PLC0415

    builder = DefaultChannelBuilder(remote)
    with closing(builder.toChannel()) as channel:
        try:
            grpc.channel_ready_future(channel).result(PATIENCE)
        except grpc.FutureTimeoutError as error:
            raise ServerUnavailable(
                f"no Spark Connect server answered at {builder.endpoint} in {PATIENCE:g} s: start it, or correct host, "
                "port and TLS in the connection"
            ) from error
