"""``airflow pgchange``: what the commands do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from airflow_pgchange import queues, schema, tubes
from airflow_pgchange.cli.common import DONE, Rows, both, command, confirm, database
from airflow_pgchange.feeds import consumers
from airflow_pgchange.feeds.commit import CommitFeed
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.queue import QueueFeed


@command("Our schemas are not here: `airflow pgchange install` makes them.")
def install(args: Namespace) -> Rows:
    with database(args) as connection:
        return [_loaded(found) for found in schema.install(connection, args.systems)]


@command("Our schemas are not here: `airflow pgchange install` makes them.")
def upgrade(args: Namespace) -> Rows:
    with database(args) as connection:
        return [_loaded(found) for found in schema.upgrade(connection)]


@command("Our schemas are not here: nothing to remove.")
def uninstall(args: Namespace) -> Rows:
    confirm(args, "Queues, watermarks and what waits in them will be gone; tables of yours stay.")
    with database(args) as connection:
        return [{"removed": name} for name in schema.uninstall(connection, args.systems)]


@command("No consumer has begun here yet: the first claim makes one.")
def status(args: Namespace) -> Rows:
    with both(args) as (results, source):
        rows = [
            {
                "consumer": f"{one.consumer_id}/{one.branch_id}",
                **_without(one, "consumer_id", "branch_id", "version"),
            }
            for one in consumers.status(results, source)
        ]
        if any(state.system == "tube" for state in schema.installed(source)):
            rows += [
                {"consumer": one.feed.name, **_without(one, "tube", "worker", "workers")}
                for one in tubes.status(source)
            ]
        if any(state.system == "mbus" for state in schema.installed(source)):
            rows += [
                {"consumer": one.feed.name, **_without(one, "queue", "name")} for one in queues.status(source)
            ]
    return rows if args.output == "json" else [_brief(row) for row in rows]


@command(DONE)
def skip(args: Namespace) -> Rows:
    worker = _worker(args.consumer)
    feed = None if worker is not None else _of_queue(args.consumer) or _feed(args.consumer)
    with both(args) as (results, source):
        if feed is not None:
            skipped = consumers.skip(results, source, feed, args.reason)
        elif worker is not None:
            skipped = tubes.skip(source, tubes.worker(source, *worker), args.reason)
    return [{"consumer": args.consumer, "skipped": skipped}]


@command(DONE)
def repair(args: Namespace) -> Rows:
    feed = _feed(args.consumer)
    confirm(args, f"{feed.name} will go on from what the source still knows of it; batches may come again.")
    with both(args) as (results, source):
        return [{"consumer": feed.name, "from_here_on": consumers.repair(results, source, feed)}]


@command(DONE)
def move(args: Namespace) -> Rows:
    feed = _feed(args.consumer)
    to = args.to if args.to in ("beginning", "now") else _time(args.to)
    confirm(args, f"{feed.name} will move to {args.to}: changes are left out, or come again.")
    with both(args) as (results, source):
        consumers.move(results, source, feed, to)
    return [{"consumer": feed.name, "moved_to": args.to}]


@command(DONE)
def drop(args: Namespace) -> Rows:
    feed = _feed(args.consumer)
    confirm(args, f"{feed.name} will be forgotten; under the same name it would begin anew.")
    with both(args) as (results, source):
        consumers.drop(results, source, feed)
    return [{"consumer": feed.name, "dropped": True}]


@command("Nothing is both old enough and processed by every consumer: nothing was removed.")
def trim(args: Namespace) -> Rows:
    confirm(args, f"History older than {args.keep} will be gone; consumers that come later will not get it.")
    with database(args) as connection:
        return [{"trimmed": line} for line in consumers.trim(connection, args.keep)]


def _loaded(state: schema.Installed) -> dict[str, Any]:
    files = {True: "this package", False: "other files of this version", None: "psql"}
    return {
        "system": state.system,
        "version": state.version,
        "needed": state.needed,
        "loaded from": files[state.intact],
    }


def _worker(name: str) -> tuple[str, int] | None:
    """Tube and number of the worker that a name means; None for a consumer of the commit queue."""
    if not name.startswith("tube:"):
        return None
    tube, _, worker = name.removeprefix("tube:").rpartition("/")
    if not tube or not worker.isdigit():
        raise InvalidArgument(f"{name!r} is no worker of a tube: write it as status names it, tube:copies/0")
    return tube, int(worker)


def _of_queue(name: str) -> QueueFeed | None:
    """The feed of a queue's consumer that a name means; None for any other."""
    if not name.startswith("queue:"):
        return None
    queue, _, consumer = name.removeprefix("queue:").rpartition("/")
    if not queue:
        raise InvalidArgument(
            f"{name!r} is no consumer of a queue: write it as status names it, queue:orders/default"
        )
    return QueueFeed(queue, consumer)


def _feed(name: str) -> CommitFeed:
    if name.startswith("queue:"):
        raise InvalidArgument(
            f"{name!r} is a consumer of a queue, which has no watermark to repair, move or drop: "
            "`airflow pgchange skip` gives up its batch, mbus.drop_consumer() removes it"
        )
    if name.startswith("tube:"):
        raise InvalidArgument(
            f"{name!r} is a worker of a tube, which has no watermark to repair, move or drop: "
            "`airflow pgchange skip` gives up its batch, tube.tube_ensure_absent() removes a tube"
        )
    consumer, _, branch = name.rpartition("/")
    if not consumer or not branch.isdigit():
        raise InvalidArgument(f"{name!r} is no consumer: write it as status names it, delays/0")
    return CommitFeed(consumer, int(branch))


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{text!r} is neither 'beginning' nor 'now' nor a time such as 2026-01-31T12:00:00+00:00"
        ) from error


def _without(one: Any, *names: str) -> dict[str, Any]:
    return {key: value for key, value in asdict(one).items() if key not in names}


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """A consumer on one line."""
    number = str(row["ready"]) if row["ready_exact"] in (True, None) else f"~{row['ready']}"
    return {
        "consumer": row["consumer"],
        "ready": "?" if row["ready"] is None else number,
        "oldest": "" if row["oldest_seconds"] is None else f"{row['oldest_seconds']:.0f} s",
        "waiting": "?" if row["waiting"] is None else row["waiting"],
        "faults": "?" if row["faults"] is None else row["faults"],
        "at work": "yes" if row["at_work"] else "",
        "batch": "" if row["batch_id"] is None else f"{row['batch_id']}, attempt {row['attempt']}",
        "progress": "" if row["updated_at"] is None else f"{row['updated_at']:%Y-%m-%d %H:%M:%S}",
        "held back by": row.get("held_back_by") or "",
    }
