"""``airflow pgchange``: what the commands do."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from airflow_pgchange import administration, schema
from airflow_pgchange.cli.common import DONE, Rows, both, command, confirm, database
from airflow_pgchange.feeds import consumers
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.queries import interval
from airflow_pgchange.health import findings


@command("Our schemas are not here: `airflow pgchange install` makes them.")
def install(args: Namespace) -> Rows:
    with database(args) as connection:
        return [
            _loaded(found) for found in schema.install(connection, args.systems, without=args.without or ())
        ]


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
        rows = administration.status(results, source, lambda text: print(text, file=sys.stderr))
    return rows if args.output == "json" else [_brief(row) for row in rows]


@command("Nothing needs a person.")
def health(args: Namespace) -> Rows:
    with database(args) as connection:
        found = [asdict(one) for one in findings(connection, lambda text: print(text, file=sys.stderr))]
    return (
        found if args.output == "json" else [{key: cell or "" for key, cell in row.items()} for row in found]
    )


@command(DONE)
def skip(args: Namespace) -> Rows:
    consumer = administration.named(args.consumer)
    with both(args) as (results, source):
        skipped = consumers.skip(results, source, consumer(source), args.reason)
    return [{"consumer": args.consumer, "skipped": skipped}]


@command(DONE)
def repair(args: Namespace) -> Rows:
    feed = administration.movable(args.consumer)
    confirm(args, f"{feed.name} will go on from what the source still knows of it; batches may come again.")
    with both(args) as (results, source):
        repaired = consumers.repair(results, source, feed)
    return [{"consumer": feed.name, "from_here_on": repaired}]


@command(DONE)
def move(args: Namespace) -> Rows:
    feed = administration.movable(args.consumer)
    to = args.to if args.to in ("beginning", "now") else _time(args.to)
    confirm(args, f"{feed.name} will move to {args.to}: changes are left out, or come again.")
    with both(args) as (results, source):
        consumers.move(results, source, feed, to)
    return [{"consumer": feed.name, "moved_to": args.to}]


@command(DONE)
def drop(args: Namespace) -> Rows:
    feed = administration.movable(args.consumer)
    confirm(args, f"{feed.name} will be forgotten; under the same name it would begin anew.")
    with both(args) as (results, source):
        consumers.drop(results, source, feed)
    return [{"consumer": feed.name, "dropped": True}]


@command("Nothing is both old enough and processed by every consumer: nothing was removed.")
def trim(args: Namespace) -> Rows:
    with database(args) as connection:
        interval(connection, "--keep", args.keep)
        confirm(
            args, f"History older than {args.keep} will be gone; consumers that come later will not get it."
        )
        return [{"trimmed": line} for line in consumers.trim(connection, args.keep)]


def _loaded(state: schema.Installed) -> dict[str, Any]:
    files = {True: "this package", False: "other files of this version", None: "psql"}
    return {
        "system": state.system,
        "version": state.version,
        "needed": state.needed,
        "loaded from": f"left out: {state.left_out}" if state.left_out else files[state.intact],
    }


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{text!r} is neither 'beginning' nor 'now' nor a time such as 2026-01-31T12:00:00+00:00"
        ) from error


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
