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

from airflow_pgchange.admin.watching import hindrance
from airflow_pgchange.cli.common import Rows, command, conninfo_by_name, metadata, stored_connections
from airflow_pgchange.errors import InvalidArgument, PgChangeError
from airflow_pgchange.feeds.connections import both as both_databases
from airflow_pgchange.feeds.connections import keep_open
from airflow_pgchange.feeds.error_text import described, without_secrets
from airflow_pgchange.feeds.feed import BEGINNING, Feed, Watched
from airflow_pgchange.feeds.starting import outlook
from airflow_pgchange.operators.spark_checks import check_spark, environment_of
from airflow_pgchange.plugins.looks import LIMITS, REACH
from airflow_pgchange.plugins.places import Named, ParsedDag, ParsedDags, Place
from airflow_pgchange.plugins.spark_tasks import SparkNeeds
from airflow_pgchange.plugins.watched_assets import Clash, WatchedAsset, clashes
from airflow_pgchange.utils.compat import dag_bag, dag_serialization

Naming = dict[Place, dict[Watched | None, set[str]]]
"""Of each place the feeds that are named there, and by which DAGs; None: its connections are named without a feed."""
Starts = dict[tuple[Place, str], dict[str, set[str]]]
"""The starts of each consumer at a place. Each start has the DAGs whose tasks give it."""


@dataclass(frozen=True)
class Read:
    """What the files or the database say of each DAG.

    ``named`` are the feeds and connections that it names, ``assets`` the assets with watchers, ``spark`` how
    its tasks submit to Spark. ``unread`` says what could not be read, with the DAG if it is known.
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
    naming, found, starts = naming_of(read.named), clashes(read.assets), starts_of(read.named)
    return [
        *(
            _row(place, *told)
            for place in sorted(naming, key=str)
            for told in _told(place, naming[place], found, starts)
        ),
        *(() if args.no_spark else _of_spark(read.spark)),
        *(_row(None, "", {dag_id}, "", why) for dag_id, why in read.unread),
    ]


def naming_of(named: Mapping[str, Iterable[Named]]) -> Naming:
    """What each DAG names, by its places."""
    found: Naming = defaultdict(lambda: defaultdict(set))
    for dag_id, all_named in named.items():
        for one in all_named:
            found[one.place][one.feed].add(dag_id)
    for feeds in found.values():
        if len(feeds) > 1:
            feeds.pop(None, None)
    return found


def starts_of(named: Mapping[str, Iterable[Named]]) -> Starts:
    """Where the tasks of each DAG start a consumer that is new."""
    found: Starts = defaultdict(lambda: defaultdict(set))
    for dag_id, all_named in named.items():
        for one in all_named:
            if one.consumer is not None and one.start is not None:
                found[one.place, one.consumer][one.start].add(dag_id)
    return found


def _told(
    place: Place, feeds: Mapping[Watched | None, set[str]], found: Sequence[Clash], starts: Starts
) -> Iterator[tuple[str, set[str], str, str]]:
    """Yield for each feed its name, its DAGs, the start of its consumer if this is new, and what is wrong."""
    ordered = sorted(feeds.items(), key=lambda item: "" if item[0] is None else item[0].name)
    known: list[str] = []
    told: list[tuple[str | None, str | None]] = []
    try:
        known += [conninfo_by_name(one) for one in place.connections]
        reached = [make_conninfo(conninfo, **REACH) for conninfo in known]
        with both_databases(reached[0], reached[1] if place.source else None, primary=False) as opened:
            for connection in opened:
                keep_open(connection, **LIMITS)
            told += [
                _asked(*opened, feed, starts[place, feed.name if feed else ""]) for feed, dags in ordered
            ]
    except (PgChangeError, psycopg.Error) as error:
        told = [(None, str(error).strip())] * len(ordered)
    for (feed, dags), (new, why) in zip(ordered, told, strict=True):
        name = "" if feed is None else feed.name
        wrong = [clash.told() for clash in found if feed and clash.is_of(place.connection, feed)]
        if why:
            wrong.insert(0, without_secrets(why, known))
        if new is not None and len(starts[place, name]) > 1:
            wrong.append(_two_starts(starts[place, name]))
        yield name, dags, new or "", "; ".join(wrong)


def _asked(
    results: psycopg.Connection[Any],
    source: psycopg.Connection[Any],
    feed: Watched | None,
    starts: Mapping[str, set[str]],
) -> tuple[str | None, str | None]:
    """Where the consumer of a feed starts if it is new, and what keeps the feed from being watched."""
    if feed is None:
        return None, None
    why = hindrance(results, source, feed)
    if why or not isinstance(feed, Feed):
        return None, why
    found = outlook(results, source, feed, min(starts, default=BEGINNING))
    return None if found is None else str(found), None


def _two_starts(starts: Mapping[str, set[str]]) -> str:
    each = "; ".join(
        f"start={start!r} in {', '.join(sorted(dags))}" for start, dags in sorted(starts.items())
    )
    return (
        f"DAGs start this new consumer at different places, and the DAG that runs first decides: {each}; give the feed "
        "the same start in each"
    )


def _of_spark(needed: Mapping[str, Iterable[SparkNeeds]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each Spark connection, or for each of the ways in which tasks use it."""
    dags: dict[SparkNeeds, set[str]] = defaultdict(set)
    for dag_id, all_needs in needed.items():
        for needs in all_needs:
            dags[needs].add(dag_id)
    for needs in sorted(dags):
        yield _row(Place(needs.conn_id), "", dags[needs], "", _spark_trouble(needs))


def _spark_trouble(needs: SparkNeeds) -> str:
    """Why Spark cannot run a task's batches on this machine."""
    try:
        # Imported here, because Spark is an extra.
        import_module("airflow_pgchange.spark.installed").check_versions()
        with stored_connections():
            check_spark(needs.conn_id, needs.binary, needs.of_a_driver, environment_of(needs.environment))
    except PgChangeError as error:
        return str(error)
    return ""


def _row(place: Place | None, consumer: str, dags: set[str], new: str, why: str) -> dict[str, Any]:
    return {
        "connection": "" if place is None else place.connection,
        "source": "" if place is None else place.source or "",
        "consumer": consumer,
        "dags": ", ".join(sorted(dags)),
        "new consumer": new,
        "can be watched": "no" if why else "yes",
        "hindrance": why,
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
    """What the DAGs of files, or of folders, name. Raises InvalidArgument for one that is not there."""
    for path in files:
        if not path.exists():
            raise InvalidArgument(f"{path} is not there: name DAG files, or folders of them")
    named: dict[str, list[Named]] = defaultdict(list)
    assets: dict[str, list[WatchedAsset]] = defaultdict(list)
    spark: dict[str, list[SparkNeeds]] = defaultdict(list)
    unread: list[tuple[str, str]] = []
    for path in files:
        there = path.absolute()
        bag = dag_bag(there, there if there.is_dir() else there.parent)
        unread += [
            ("", f"{file} cannot be imported: {error.strip()}") for file, error in bag.import_errors.items()
        ]
        for dag_id, dag in bag.dags.items():
            # Whatever a DAG's own classes raise.
            try:
                found = ParsedDag.of(dag_serialization().to_dict(dag))
            except Exception as error:  # noqa: BLE001
                unread.append((dag_id, f"{dag.fileloc}: {dag_id} cannot be serialized: {described(error)}"))
            else:
                named[dag_id] += found.named
                assets[dag_id] += found.assets
                spark[dag_id] += found.spark
    return Read(named, assets, spark, unread)
