"""What the operator hands to a Spark application, and how: a file that only its user can read.

An application that serves batch after batch asks for the next one by a file beside it, and is answered by another request
in the first one's place; an empty one says that there is none.

An environment variable would end on a command line (the Spark hook passes them as ``--conf`` on YARN and
Kubernetes) and holds 128 kB at most, so the environment carries the name of a file and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import feed as feeds
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.topology.bucket_owners import Cluster

REQUEST = "PGCHANGE_REQUEST"
"""The environment variable that names the file."""
NAME = "request.json"
WANTED = "wanted"
LOOK_EVERY = 0.02
"""Seconds between two looks for the next request."""


@dataclass(frozen=True)
class Work:
    """One batch to process: ``results`` and ``source`` are libpq connection strings, secret ones. ``cluster`` is the one
    whose tables' rows it may want."""

    feed: Feed
    batch: Batch
    results: str
    source: str
    cluster: Cluster | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.feed.name}, {self.batch.id}, attempt {self.batch.attempt})"


@dataclass(frozen=True, repr=False)
class Request(Work):
    """Work of an application beside an operator, which writes its ``manifest`` to a file for the operator."""

    manifest: Path = field(kw_only=True)


def write(request: Request) -> Path:
    """Write the request beside its manifest, so that only its user can read it; returns its path."""
    data = {
        "feed": feeds.to_json(request.feed),
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


def wanted(folder: Path) -> bool:
    """Whether the application, whose requests are in the folder, waits for another."""
    return (folder / WANTED).exists()


def end(folder: Path) -> None:
    """Tell the application that there are no more."""
    (folder / NAME).touch()


def take() -> Request:
    """The request that this process was started with; its file is deleted, so that it can be taken once.

    Raises InvalidArgument where there is none.
    """
    path = os.environ.get(REQUEST)
    if not path:
        raise InvalidArgument(
            f"no batch was handed to this application ({REQUEST} is not set): start it with "
            "SparkBatchOperator, or with what airflow_pgchange.spark.submit.environment() returns"
        )
    try:
        return _taken(Path(path))
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"the batch in {path} was already taken: one batch_job() in an application, or one loop over batch_jobs()"
        ) from error


def take_next() -> Request | None:
    """Ask for another request, and wait for it; None where there is none any more."""
    path = Path(os.environ[REQUEST])
    path.with_name(WANTED).touch()
    while not path.exists():
        time.sleep(LOOK_EVERY)
    return _taken(path) if path.stat().st_size else None


def _taken(path: Path) -> Request:
    data = json.loads(path.read_text())
    path.unlink()
    feed = feeds.from_json(data["feed"])
    if not isinstance(feed, Feed):
        raise InvalidArgument(f"{feed.name} gives no batches")
    return Request(
        feed=feed,
        batch=Batch.from_json(data["batch"]),
        results=data["results"],
        source=data["source"],
        manifest=Path(data["manifest"]),
        cluster=None if data["cluster"] is None else Cluster(**data["cluster"]),
    )
