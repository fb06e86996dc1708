"""What the operator hands to a Spark application, and how: a file that only its user can read.

An environment variable would end on a command line (the Spark hook passes them as ``--conf`` on YARN and
Kubernetes) and holds 128 kB at most, so the environment carries the name of a file and nothing else.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from airflow_pgchange.feeds import feed as feeds
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.bucket_owners import Cluster
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import Feed

REQUEST = "PGCHANGE_REQUEST"
"""The environment variable that names the file."""


@dataclass(frozen=True)
class Request:
    """One batch to process: ``results`` and ``source`` are libpq connection strings, secret ones. ``cluster`` is the one
    whose tables' rows it may want."""

    feed: Feed
    batch: Batch
    results: str
    source: str
    manifest: Path
    cluster: Cluster | None = None

    def __repr__(self) -> str:
        return f"Request({self.feed.name}, {self.batch.id}, attempt {self.batch.attempt})"


def write(request: Request, path: Path) -> None:
    """Write the request so that only its user can read it. ``path`` must not exist yet."""
    data = {
        "feed": feeds.to_json(request.feed),
        "batch": request.batch.to_json(),
        "results": request.results,
        "source": request.source,
        "manifest": str(request.manifest.absolute()),
        "cluster": None if request.cluster is None else asdict(request.cluster),
    }
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(data, file)


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
        data = json.loads(Path(path).read_text())
        Path(path).unlink()
    except FileNotFoundError as error:
        raise InvalidArgument(
            f"the batch in {path} was already taken: one batch_job() in an application"
        ) from error
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
