"""What a session needs to process a batch, in a driver of its own or on a Spark Connect server."""

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
from airflow_pgchange.spark.installed import check_pair, sends_rows

if TYPE_CHECKING:
    from pyspark.sql.connect.shell.progress import StageInfo

PATIENCE = 60.0
"""Seconds for a server to answer."""
RETRIES = 6
"""How often a server that has answered before is asked again when it does not: for that minute. Spark's client would by
itself go on for ten."""

_shipped: WeakKeyDictionary[SparkSession, set[Path]] = WeakKeyDictionary()


def prepare(remote: str, conf: Mapping[str, str], py_files: Sequence[str]) -> None:
    """Open the session on a Connect server that the application will find, as ``spark-submit`` has a driver ready:
    with its settings, and its files in reach of the server's Python and of this one. ``remote`` is the connection string
    that the environment has. Raises InvalidArgument, PermissionDenied if the server refuses the token, and
    ServerUnavailable where the server does not answer; one that goes away later fails what asks it within minutes."""
    # What submits a batch has no use for a server's client, whose import takes a second.
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
                f"{name} cannot be set for one session of a Spark Connect server: set it where the server is started, "
                "and leave it out of the operator's conf"
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
        # Spark's client has no other sign of it.
        if "UNAUTHENTICATED" not in str(error):
            raise
        raise PermissionDenied(
            "the Spark Connect server refused the token of the connection: correct the connection's password, which "
            "is the server's SPARK_CONNECT_AUTHENTICATE_TOKEN"
        ) from error


def opened() -> SparkSession:
    """Return the session of this application. Raises VersionsDiffer if the server's Spark and the one that is installed
    here cannot work together."""
    spark = SparkSession.builder.appName("pgchange").getOrCreate()
    if is_remote():
        check_pair(pyspark.version.__version__, spark.version)
    return spark


def makes_frames(spark: SparkSession) -> bool:
    """Whether the session can make a frame of rows that this process has."""
    return not is_remote() or sends_rows(pyspark.version.__version__, spark.version)


def ship(spark: SparkSession) -> None:
    """Let the server's Python processes have this package, once for a session; a driver of its own was given it."""
    if not is_remote():
        return
    archive, shipped = package.archive(), _shipped.setdefault(spark, set())
    if archive not in shipped:
        spark.addArtifacts(str(archive), pyfile=True)
        shipped.add(archive)


@contextmanager
def followed(spark: SparkSession, note: Callable[[str, str], None]) -> Iterator[None]:
    """Note how many stages of what runs in the block are done, as a server tells its client."""
    if not is_remote():
        yield
        return

    def told(stages: Iterable[StageInfo] | None, **_: object) -> None:
        if known := list(stages or ()):
            note("stages", f"{sum(stage.done for stage in known)} of {len(known)} done")

    spark.registerProgressHandler(told)  # type: ignore[arg-type]
    try:
        yield
    finally:
        spark.removeProgressHandler(told)  # type: ignore[arg-type]


def parallelism(spark: SparkSession) -> int:
    """Into how many parts the session divides what says nothing of it, as one of its plans tells without being run."""
    plan = io.StringIO()
    with redirect_stdout(plan):
        spark.range(1).explain()
    told = re.search(r"splits=(\d+)", plan.getvalue())
    return int(told[1]) if told else 1


def _reach(remote: str) -> None:
    """Wait for the server, as its client would for ten minutes without a word."""
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
