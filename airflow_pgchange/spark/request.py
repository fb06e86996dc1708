"""The request of an operator to a Spark application, in a file that only its user can read.

An application that processes several batches asks for the next batch by creating a second file. The operator then
writes another request to the first file. An empty file means that there are no more batches.

The environment has only the name of the file. On YARN and Kubernetes the Spark hook passes environment variables on a
command line, as ``--conf``, where secrets would show. A variable also holds at most 128 kB.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import feed_kinds
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.topology.bucket_owners import Cluster

REQUEST = "PGCHANGE_REQUEST"
"""The environment variable that names the file."""
NAME = "request.json"
WANTED = "wanted"
LOOK_EVERY = 0.02
"""Seconds between two checks for the next request."""


@dataclass(frozen=True)
class Work:
    """A batch to process. ``results`` and ``source`` are libpq connection strings with secrets. ``cluster`` is for rows
    of tables that are spread over a cluster."""

    feed: Feed
    batch: Batch
    results: str
    source: str
    cluster: Cluster | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.feed.name}, {self.batch.id}, attempt {self.batch.attempt})"


@dataclass(frozen=True, repr=False)
class Request(Work):
    """A batch for an application that an operator started. The application writes its result to the file ``manifest``."""

    manifest: Path = field(kw_only=True)


def write(request: Request) -> Path:
    """Write the request beside its manifest, readable only by its user, and return its path."""
    data = {
        "feed": feed_kinds.to_json(request.feed),
        "batch": request.batch.to_json(),
        "results": request.results,
        "source": request.source,
        "manifest": str(request.manifest.absolute()),
        "cluster": None if request.cluster is None else asdict(request.cluster),
    }
    path = request.manifest.absolute().with_name(NAME)
    path.with_name(WANTED).unlink(missing_ok=True)
    part = path.with_name(NAME + ".part")
    with open(part, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(data, file)
    part.replace(path)
    return path


def wants_more(folder: Path) -> bool:
    """Whether the application with requests in this folder waits for another batch."""
    return (folder / WANTED).exists()


def end(folder: Path) -> None:
    """Tell the application that there are no more batches."""
    (folder / NAME).touch()


def take() -> Request:
    """Return the request with which this process was started. Its file is deleted, so it can be taken only once.

    Raises InvalidArgument if there is no request.
    """
    path = os.environ.get(REQUEST)
    if not path:
        raise InvalidArgument(
            f"no batch was handed to this application ({REQUEST} is not set): start it with SparkBatchOperator, or "
            f"with the environment that airflow_pgchange.spark.submit.environment() returns"
        )
    try:
        return _taken(Path(path))
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"the batch in {path} was already taken: use one batch_job() in an application, or one loop over batch_jobs()"
        ) from error


def take_next() -> Request | None:
    """Ask for another request, wait for it and return it; None if there are no more."""
    path = Path(os.environ[REQUEST])
    path.with_name(WANTED).touch()
    while not path.exists():
        time.sleep(LOOK_EVERY)
    return _taken(path) if path.stat().st_size else None


def _taken(path: Path) -> Request:
    data = json.loads(path.read_text())
    path.unlink()
    feed = feed_kinds.from_json(data["feed"])
    if not isinstance(feed, Feed):
        raise InvalidArgument(f"{feed.name} is a condition and has no batches: use a feed")
    return Request(
        feed=feed,
        batch=Batch.from_json(data["batch"]),
        results=data["results"],
        source=data["source"],
        manifest=Path(data["manifest"]),
        cluster=None if data["cluster"] is None else Cluster(**data["cluster"]),
    )
