"""Commands that change consumers: ``register``, ``skip``, ``release``, ``repair``, ``move`` and ``drop``."""

from __future__ import annotations

from argparse import Namespace

from airflow_pgchange.admin import consumers, manual_operations
from airflow_pgchange.cli.common import DONE, Rows, both, command, confirm, database
from airflow_pgchange.feeds.argument_checks import time_of
from airflow_pgchange.lake.tables import Delta


@command(DONE)
def skip(args: Namespace) -> Rows:
    consumer = consumers.named(args.consumer)
    with both(args) as (results, source):
        skipped = manual_operations.skip_batch(results, source, consumer(source), args.reason)
    return [{"consumer": args.consumer, "skipped": skipped}]


@command(DONE)
def release(args: Namespace) -> Rows:
    consumer = consumers.named(args.consumer)
    confirm(args, f"The batches of {args.consumer} that jobs process at this time will be claimed again.")
    with database(args) as connection:
        ended = manual_operations.end_leases(connection, consumer(connection))
    return [{"consumer": args.consumer, "leases_ended": ended}]


@command(DONE)
def repair(args: Namespace) -> Rows:
    if args.delta is not None:
        return _repair_delta(args)
    feed = consumers.movable(args.consumer)
    confirm(args, f"{feed.name} will go on from what the source still knows of it; batches may come again.")
    with both(args) as (results, source):
        repaired = manual_operations.repair_consumer(results, source, feed)
    return [{"consumer": feed.name, "from_here_on": repaired}]


def _repair_delta(args: Namespace) -> Rows:
    consumer, table = consumers.named(args.consumer), Delta(args.delta)
    confirm(
        args, f"{table} will get the batch in work of {args.consumer}; rows that it has already come twice."
    )
    with both(args) as (results, source):
        batch = manual_operations.repair_delta(results, source, consumer(source), table)
    return [{"consumer": args.consumer, "table": args.delta, "accepts": batch}]


@command(DONE)
def move(args: Namespace) -> Rows:
    feed = consumers.movable(args.consumer)
    to = args.to if args.to in ("beginning", "now") else time_of("--to (beginning, now or a time)", args.to)
    confirm(args, f"{feed.name} will move to {args.to}: changes are left out, or come again.")
    with both(args) as (results, source):
        manual_operations.move_consumer(results, source, feed, to)
    return [{"consumer": feed.name, "moved_to": args.to}]


@command(DONE)
def register(args: Namespace) -> Rows:
    feed = consumers.movable(args.consumer)
    with both(args) as (results, source):
        manual_operations.register_consumer(results, source, feed, args.start)
    return [{"consumer": feed.name, "starts_at": args.start}]


@command(DONE)
def drop(args: Namespace) -> Rows:
    feed = consumers.movable(args.consumer)
    confirm(args, f"{feed.name} will be forgotten; under the same name it would begin anew.")
    with both(args) as (results, source):
        manual_operations.drop_consumer(results, source, feed)
    return [{"consumer": feed.name, "dropped": True}]
