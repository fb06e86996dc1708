"""``airflow-pgchange check``: whether the feeds that DAGs name can be watched, and whether Spark can run batches."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin.watch_checks import hindrance
from airflow_pgchange.cli.common import Rows, command, conninfo_by_name, metadata, stored_connections
from airflow_pgchange.errors import InvalidArgument, PgChangeError
from airflow_pgchange.feeds.connections import both as both_databases
from airflow_pgchange.feeds.connections import keep_open
from airflow_pgchange.feeds.error_text import described, without_secrets
from airflow_pgchange.feeds.feed import BEGINNING, Feed, Watched
from airflow_pgchange.feeds.start_position import outlook
from airflow_pgchange.operators.spark_checks import check_spark, environment_of
from airflow_pgchange.plugins.databases import Named, ParsedDag, ParsedDags, Place
from airflow_pgchange.plugins.query_threads import LIMITS, REACH
from airflow_pgchange.plugins.spark_tasks import SparkNeeds
from airflow_pgchange.plugins.watched_assets import Clash, WatchedAsset, clashes
from airflow_pgchange.utils.compat import dag_bag, dag_serialization

Naming = dict[Place, dict[Watched | None, set[str]]]
"""By place (a pair of connections): the feeds that DAGs name there, with the ids of these DAGs. The feed is None if DAGs
name only the connections."""
Starts = dict[tuple[Place, str], dict[str, set[str]]]
"""By consumer: the values of ``start`` in tasks, such as "beginning", each with the ids of its DAGs. Different values for
one consumer are an error."""


@dataclass(frozen=True)
class Read:
    """The contents of DAGs, from their files or from Airflow's database, by DAG id.

    ``named``: the feeds and connections that the DAG names. ``assets``: its assets with watchers. ``spark``: how its
    tasks submit to Spark. ``unread``: pairs of a DAG id, empty if unknown, and the error that prevented reading it.
    """

    named: Mapping[str, Sequence[Named]]
    assets: Mapping[str, Sequence[WatchedAsset]]
    spark: Mapping[str, Sequence[SparkNeeds]]
    unread: Sequence[tuple[str, str]] = ()


@command(
    "No DAG names a feed.",
    bad=lambda rows: any(row["hindrance"] for row in rows),
)
def check(args: Namespace) -> Rows:
    read = _in_files(args.files) if args.files else _parsed()
    naming, asset_clashes, starts = naming_of(read.named), clashes(read.assets), starts_of(read.named)
    return [
        *(
            _row(place, *outcome)
            for place in sorted(naming, key=str)
            for outcome in _check_place(place, naming[place], asset_clashes, starts)
        ),
        *(() if args.no_spark else _of_spark(read.spark)),
        *(_row(None, "", {dag_id}, "", error) for dag_id, error in read.unread),
    ]


def naming_of(named: Mapping[str, Iterable[Named]]) -> Naming:
    """Group the feeds that DAGs name by place."""
    naming: Naming = defaultdict(lambda: defaultdict(set))
    for dag_id, all_named in named.items():
        for each in all_named:
            naming[each.place][each.feed].add(dag_id)
    for feeds in naming.values():
        if len(feeds) > 1:
            feeds.pop(None, None)
    return naming


def starts_of(named: Mapping[str, Iterable[Named]]) -> Starts:
    """Collect, by consumer, the argument ``start`` of tasks with the ids of their DAGs."""
    starts: Starts = defaultdict(lambda: defaultdict(set))
    for dag_id, all_named in named.items():
        for each in all_named:
            if each.consumer is not None and each.start is not None:
                starts[each.place, each.consumer][each.start].add(dag_id)
    return starts


def _check_place(
    place: Place, feeds: Mapping[Watched | None, set[str]], asset_clashes: Sequence[Clash], starts: Starts
) -> Iterator[tuple[str, set[str], str, str]]:
    """Yield for each feed its name, its DAGs, its problems, and the position at which its consumer will start, if new."""
    ordered = sorted(feeds.items(), key=lambda item: "" if item[0] is None else item[0].name)
    conninfos: list[str] = []
    results: list[tuple[str | None, str | None]] = []
    try:
        conninfos += [conninfo_by_name(conn_id) for conn_id in place.connections]
        limited = [make_conninfo(conninfo, **REACH) for conninfo in conninfos]
        with both_databases(limited[0], limited[1] if place.source else None, primary=False) as opened:
            for connection in opened:
                keep_open(connection, **LIMITS)
            results += [
                _check_feed(*opened, feed, starts[place, feed.name if feed else ""]) for feed, dags in ordered
            ]
    except (PgChangeError, psycopg.Error) as error:
        results = [(None, str(error).strip())] * len(ordered)
    for (feed, dags), (new, problem) in zip(ordered, results, strict=True):
        name = "" if feed is None else feed.name
        problems = [
            clash.description() for clash in asset_clashes if feed and clash.is_of(place.connection, feed)
        ]
        if problem:
            problems.insert(0, without_secrets(problem, conninfos))
        if new is not None and len(starts[place, name]) > 1:
            problems.append(_two_starts(starts[place, name]))
        yield name, dags, new or "", "; ".join(problems)


def _check_feed(
    results: psycopg.Connection[Any],
    source: psycopg.Connection[Any],
    feed: Watched | None,
    starts: Mapping[str, set[str]],
) -> tuple[str | None, str | None]:
    """Return the position at which the feed's consumer will start, or None if the consumer is not new. Return also the
    reason why the feed cannot be watched, or None."""
    if feed is None:
        return None, None
    problem = hindrance(results, source, feed)
    if problem or not isinstance(feed, Feed):
        return None, problem
    new = outlook(results, source, feed, min(starts, default=BEGINNING))
    return None if new is None else str(new), None


def _two_starts(starts: Mapping[str, set[str]]) -> str:
    each = "; ".join(
        f"start={start!r} in {', '.join(sorted(dags))}" for start, dags in sorted(starts.items())
    )
    return (
        f"DAGs start this new consumer at different places, and the DAG that runs first decides: {each}; give the feed "
        "the same start in each"
    )


def _of_spark(needed: Mapping[str, Iterable[SparkNeeds]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each Spark connection, or several if tasks use it with different settings."""
    dags: dict[SparkNeeds, set[str]] = defaultdict(set)
    for dag_id, all_needs in needed.items():
        for needs in all_needs:
            dags[needs].add(dag_id)
    for needs in sorted(dags):
        yield _row(Place(needs.conn_id), "", dags[needs], "", _spark_problem(needs))


def _spark_problem(needs: SparkNeeds) -> str:
    """Return the reason why Spark cannot run a task's batches on this machine; empty if it can."""
    try:
        # Imported here, because Spark is an extra.
        import_module("airflow_pgchange.spark.installed_versions").check_versions()
        with stored_connections():
            check_spark(needs.conn_id, needs.binary, needs.of_a_driver, environment_of(needs.environment))
    except PgChangeError as error:
        return str(error)
    return ""


def _row(place: Place | None, consumer: str, dags: set[str], new: str, problem: str) -> dict[str, Any]:
    return {
        "connection": "" if place is None else place.connection,
        "source": "" if place is None else place.source or "",
        "consumer": consumer,
        "dags": ", ".join(sorted(dags)),
        "new consumer": new,
        "can be watched": "no" if problem else "yes",
        "hindrance": problem,
    }


def _parsed() -> Read:
    with metadata("run airflow db migrate, or name DAG files: airflow-pgchange check dags") as session:
        parsed = ParsedDags().parsed(session)
    return Read(
        {dag_id: dag.named for dag_id, dag in parsed.items()},
        {dag_id: dag.assets for dag_id, dag in parsed.items()},
        {dag_id: dag.spark for dag_id, dag in parsed.items()},
    )


def _in_files(files: Sequence[Path]) -> Read:
    """Read the DAGs of files and folders. Raises InvalidArgument if a path does not exist."""
    for path in files:
        if not path.exists():
            raise InvalidArgument(f"{path} does not exist: name DAG files, or folders of them")
    named: dict[str, list[Named]] = defaultdict(list)
    assets: dict[str, list[WatchedAsset]] = defaultdict(list)
    spark: dict[str, list[SparkNeeds]] = defaultdict(list)
    unread: list[tuple[str, str]] = []
    for path in files:
        absolute = path.absolute()
        bag = dag_bag(absolute, absolute if absolute.is_dir() else absolute.parent)
        unread += [
            ("", f"{file} cannot be imported: {error.strip()}") for file, error in bag.import_errors.items()
        ]
        for dag_id, dag in bag.dags.items():
            # Catch every error, because the DAG's own classes run during serialization.
            try:
                parsed = ParsedDag.of(dag_serialization().to_dict(dag))
            except Exception as error:  # noqa: BLE001
                unread.append((dag_id, f"{dag.fileloc}: {dag_id} cannot be serialized: {described(error)}"))
            else:
                named[dag_id] += parsed.named
                assets[dag_id] += parsed.assets
                spark[dag_id] += parsed.spark
    return Read(named, assets, spark, unread)
