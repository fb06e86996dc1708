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
    confirm(
        args,
        f"Batches of {args.consumer} that jobs process now can be claimed again; results of these jobs will be refused.",
    )
    with database(args) as connection:
        ended = manual_operations.end_leases(connection, consumer(connection))
    return [{"consumer": args.consumer, "leases_ended": ended}]


@command(DONE)
def repair(args: Namespace) -> Rows:
    if args.delta is not None:
        return _repair_delta(args)
    feed = consumers.movable(args.consumer)
    confirm(
        args,
        f"{feed.name} will continue from the progress that its source has recorded; it may process batches again.",
    )
    with both(args) as (results, source):
        repaired = manual_operations.repair_consumer(results, source, feed)
    return [{"consumer": feed.name, "from_here_on": repaired}]


def _repair_delta(args: Namespace) -> Rows:
    consumer, table = consumers.named(args.consumer), Delta(args.delta)
    confirm(
        args,
        f"{table} will accept the batch in work of {args.consumer}; rows that it already has may be in it twice.",
    )
    with both(args) as (results, source):
        batch = manual_operations.repair_delta(results, source, consumer(source), table)
    return [{"consumer": args.consumer, "table": args.delta, "accepts": batch}]


@command(DONE)
def move(args: Namespace) -> Rows:
    feed = consumers.movable(args.consumer)
    to = args.to if args.to in ("beginning", "now") else time_of("--to (beginning, now or a time)", args.to)
    confirm(args, f"{feed.name} will move to {args.to}: it will skip changes, or process changes again.")
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
    confirm(
        args,
        f"Progress and dead letters of {feed.name} will be deleted; a consumer of the same name would start anew.",
    )
    with both(args) as (results, source):
        manual_operations.drop_consumer(results, source, feed)
    return [{"consumer": feed.name, "dropped": True}]
