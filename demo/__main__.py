"""`make demo`: replay a week of real flights through commits and Spark batches in Airflow. At the end the totals must
be exact, and a copy of the flights must equal the original.

Environment variables:

- DAYS (7) and WRITERS (4): the number of days to replay, and of writers.
- RATE: changes a second; by default all changes take half a minute.
- SPARK=submit: start Spark for each batch instead of one Spark Connect server.
- DSN: use this PostgreSQL instead of a temporary server.
- LAKE=1: append the movements to an Iceberg table, too.
- KEEP=1: leave everything running at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange import CommitFeed, PgChangeError, TubeFeed, admin, tubes
from airflow_pgchange.feeds import Feed, lag
from demo import flights, lake
from demo.airflow import LocalAirflow, airflow_connection, sqlalchemy_url
from demo.connect import ConnectServer
from demo.latency import Latency, watched
from demo.postgres import Cluster, embedded_binaries

FEED = CommitFeed(consumer="route_delay", branch=0)
COPIES = TubeFeed("copies")
DAG, REPLAY_DAG, BACKFILL_DAG = DAGS = "flight_delays", "tube_replay", "tube_backfill"
REPLAY = 30.0
"""Seconds that the writers take without a RATE. Batches then begin while they write, so the results of several batches
are added up."""
COPY_IS_LIKE = """
select (select count(*) from copies.flight),
       (select count(*) from (
           (table public.flight except table copies.flight) union all (table copies.flight except table public.flight)
       ) as d)
"""
QUIET = 15.0
"""Seconds until unchanged progress is printed again."""
PATIENCE = 240.0
"""Seconds without any progress after which the demo gives up."""
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def main() -> int:
    options = [
        os.environ.get(name) or usual for name, usual in (("DAYS", "7"), ("WRITERS", "4"), ("RATE", "0"))
    ]
    if (
        not all(number.isdecimal() for number in options)
        or not 1 <= int(options[0]) <= 365
        or int(options[1]) < 1
    ):
        print("DAYS is a number from 1 to 365, WRITERS one from 1 on, RATE one of changes a second")
        return 2
    days, writers, rate = map(int, options)
    if (way := os.environ.get("SPARK") or "connect") not in ("connect", "submit"):
        print("SPARK is connect or submit")
        return 2
    dsn, into_lake = os.environ.get("DSN"), os.environ.get("LAKE") == "1"
    end_on_signals()
    with ExitStack() as running:
        say("using your PostgreSQL, and an embedded one for Airflow" if dsn else "starting PostgreSQL")
        with signals_held_back():
            cluster = Cluster.create(embedded_binaries())
            running.callback(cluster.remove)
        database = dsn or new_database(cluster, "airline")
        prepare(database)
        say("reading the flights of 2013")
        rows = flights.movements(days)
        planned = flights.schedule(database, days)
        keep_a_copy(database)
        if into_lake:
            say("creating an Iceberg table")
            folder = Path(tempfile.mkdtemp(prefix="pgchange-lake-"))
            running.callback(shutil.rmtree, folder, ignore_errors=True)
            lake.create(database, folder)
        spark: dict[str, Any] = {"conn_type": "spark", "host": "local[2]"}
        if way == "connect":
            say("starting a Spark Connect server")
            spark = running.enter_context(ConnectServer()).connection
        home = Path(tempfile.mkdtemp(prefix="pgchange-airflow-"))
        running.callback(shutil.rmtree, home, ignore_errors=True)
        airflow = LocalAirflow(
            home,
            sqlalchemy_url(new_database(cluster, "airflow")),
            Path(__file__).parent / "dags",
            {"airline": airflow_connection(database), "spark_default": spark},
            # Give each consumer that changes keep busy a task slot.
            {"CORE__PARALLELISM": "3"} if into_lake else {},
        )
        say("starting Airflow: API server, scheduler, DAG processor and triggerer")
        running.enter_context(airflow)
        running.callback(say, "stopping")
        say(f"Airflow is at {airflow.url} (user {airflow.user}, password {airflow.password})")
        for dag in (*DAGS, *([lake.DAG] if into_lake else [])):
            airflow.unpause(dag)
        wait_for_watcher(database)
        airflow.trigger(BACKFILL_DAG, {"tube": COPIES.tube, "order_column": "scheduled"})
        say(f"{planned:,} flights are planned; a backfill brings those that were there before into the copy")
        seconds = len(rows) / rate if rate else REPLAY
        good = play(airflow, database, rows, writers, days=days, seconds=seconds)
        if into_lake:
            good = same_in_lake(airflow, database) and good
        if os.environ.get("KEEP") == "1":
            keep(airflow, database)
    return 0 if good else 1


def play(
    airflow: LocalAirflow, database: str, rows: list[flights.Row], writers: int, *, days: int, seconds: float
) -> bool:
    """Replay the movements, follow them to the result, and compare it with the file."""
    stop = threading.Event()
    say(
        f"{len(rows):,} departures, arrivals and cancellations of {days} days, "
        f"by {writers} writers in {seconds:.0f} s or more"
    )
    began, latency = time.monotonic(), Latency()
    with (
        ThreadPoolExecutor(1) as pool,
        watched(database, latency),
        psycopg.connect(database, autocommit=True) as connection,
    ):
        try:
            replay = pool.submit(
                flights.replay,
                database,
                rows,
                writers,
                latency.committed,
                seconds=seconds,
                stop=stop,
            )
            follow(airflow, connection, replay)
        finally:
            stop.set()
        done = time.monotonic()
        batches = batches_of(connection, FEED)
        result = connection.execute(
            "select * from public.route_delay order by carrier, origin, dest"
        ).fetchall()
        ((copied, differing),) = connection.execute(COPY_IS_LIKE).fetchall()
        replays = batches_of(connection, COPIES)
    expected = flights.expected(days)
    show(result, expected)
    same = result == expected
    noun = "batch" if batches == 1 else "batches"
    say(f"{len(rows):,} changes in {batches} {noun}")
    say("the result equals the file to the last flight" if same else "THE RESULT DIFFERS FROM THE FILE")
    say(
        f"the copy of {copied:,} flights equals the table, replays: {replays}"
        if not differing
        else f"THE COPY DIFFERS FROM THE TABLE IN {differing:,} ROWS"
    )
    say(f"all was done {done - latency.last_commit:.1f} s after the last commit")
    say(f"{latency.report()}; {len(rows) / (done - began):,.0f} changes a second from first to last")
    return same and not differing


def same_in_lake(airflow: LocalAirflow, database: str) -> bool:
    """Wait until the lake has all movements, and compare it with the table."""
    began = time.monotonic()
    with psycopg.connect(database, autocommit=True) as connection:
        while lag(connection, connection, lake.FEED).ready:
            demand_progress(airflow, time.monotonic() - began)
            time.sleep(0.2)
        batches = batches_of(connection, lake.FEED)
    rows, same = lake.compare(database)
    say(
        f"the {rows:,} rows in the lake, read by DuckDB, equal the table, batches: {batches}"
        if same
        else "THE LAKE DIFFERS FROM THE TABLE"
    )
    return same


def follow(airflow: LocalAirflow, connection: psycopg.Connection[Any], replay: Future[None]) -> None:
    """Wait until everything is committed and processed. Print the progress when it changes, and at intervals."""
    last_line, last_change, checked_at, printed_at = "", time.monotonic(), 0.0, 0.0
    while True:
        written = replay.done()
        if written:
            replay.result()
        over = written and not any(lag(connection, connection, feed).ready for feed in (FEED, COPIES))
        if over or time.monotonic() - checked_at > 3:
            checked_at = time.monotonic()
            now = standing(connection)
            if now != last_line or checked_at - printed_at > QUIET:
                printed_at = checked_at
                say(now)
            if now != last_line:
                last_line, last_change = now, checked_at
            demand_progress(airflow, checked_at - last_change)
        if over:
            return
        time.sleep(0.2)


def batches_of(connection: psycopg.Connection[Any], feed: Feed) -> int:
    """Return the number of batches that a consumer has finished; 0 before it has begun."""
    return next((row["version"] or 0 for row in admin.status(connection) if row["consumer"] == feed.name), 0)


def standing(connection: psycopg.Connection[Any]) -> str:
    """Return the progress of the writers and the consumer in a line. One snapshot counts both all changes and those
    that wait."""
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        ((committed,),) = connection.execute("select count(*) from public.movement").fetchall()
        backlog = lag(connection, connection, FEED, 1_000_000)
        touched = lag(connection, connection, COPIES, 1_000_000).ready
    batches = batches_of(connection, FEED)
    return (
        f"committed {committed:>8,}   ready {backlog.ready:>8,}   waiting {backlog.waiting:>6,}   "
        f"processed {committed - backlog.ready - backlog.waiting:>8,}   batches {batches:>3}   to copy {touched:>7,}"
    )


def demand_progress(airflow: LocalAirflow, seconds: float) -> None:
    """Raise RuntimeError, with the log of the DAG's tasks, if a run failed or if there was no progress for too long."""
    failed = [dag for dag in (*DAGS, lake.DAG) if any(run["state"] == "failed" for run in airflow.runs(dag))]
    if failed or seconds > PATIENCE:
        dag = failed[0] if failed else DAG
        raise RuntimeError(
            f"{'a run failed' if failed else 'nothing moves'}; the end of the log of {dag}:\n"
            f"{airflow.task_logs(dag)[-4000:]}"
        )


def keep(airflow: LocalAirflow, database: str) -> None:
    """Wait for a signal."""
    say(f"Airflow is at {airflow.url}, user {airflow.user}, password {airflow.password}")
    say(f"look at the database, with a psql of yours: psql '{without_password(database)}'")
    say(f"and at its consumers: {airflow.command_line()} pgchange status --postgres-conn-id airline")
    say(f"all runs on until Ctrl-C or `kill {os.getpid()}`")
    with suppress(SystemExit):
        signal.pause()


def end_on_signals() -> None:
    """Turn the first signal into SystemExit, so that everything is stopped. Ignore later signals."""

    def end(number: int, _: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    # Keep signals ignored that the shell told us to ignore, as for nohup or a background job.
    heeded = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    for each in heeded:
        signal.signal(each, end)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Delay signals until the end of the block, also signals of a terminal to our children, so that no server is left
    half started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def wait_for_watcher(database: str) -> None:
    """Wait until the triggerer watches the feed, so that the figures do not include the start of Airflow."""
    watching_now = (
        "select exists (select from pg_stat_activity where application_name = 'airflow_pgchange' "
        "and datname = current_database() and pid <> pg_backend_pid())"
    )
    deadline = time.monotonic() + PATIENCE
    with psycopg.connect(database, autocommit=True) as connection:
        while connection.execute(watching_now).fetchone() != (True,):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "no triggerer watches the feed: see the logs of Airflow's DAG processor and triggerer"
                )
            time.sleep(0.2)
    say("the triggerer watches the commit queue")


def show(result: list[flights.Row], expected: list[flights.Row]) -> None:
    """Return the five busiest routes beside the figures from the file, and every row that differs."""
    by_key = {row[:3]: row for row in result}
    busiest = sorted(expected, key=lambda row: -row[3])[:5]
    wrong = [row for row in expected if by_key.get(row[:3]) != row]
    print(f"\n{'route':<14}{'departures':>22}{'arrivals':>20}{'cancelled':>14}{'delay at departure':>24}")
    for row in busiest + [row for row in wrong if row not in busiest][:10]:
        ours = by_key.get(row[:3], (None,) * 8)
        cells = [f"{ours[n]} / {row[n]}" for n in (3, 4, 5, 6)]
        print(f"{' '.join(row[:3]):<14}{cells[0]:>22}{cells[1]:>20}{cells[2]:>14}{cells[3]:>24}")
    print(f"(result / straight from the file; {len(expected) - len(wrong)} of {len(expected)} rows agree)\n")


def prepare(database: str) -> None:
    """Install our schemas, create the tables of the demo, and track them."""
    with psycopg.connect(database, autocommit=True) as connection:
        admin.install(connection)
        connection.execute(flights.DDL)
        connection.execute("select revision.track('public.movement', branch_id => '0')")
        if connection.execute("select exists (select from public.movement)").fetchone() == (True,):
            raise SystemExit("public.movement is not empty: give the demo a database of its own")


def keep_a_copy(database: str) -> None:
    """Attach the table of flights to a tube. A backfill brings the flights that exist already."""
    with psycopg.connect(database, autocommit=True) as connection:
        tubes.ensure(connection, COPIES.tube)
        tubes.attach(connection, COPIES.tube, "public.flight", shard=0)


def new_database(cluster: Cluster, name: str) -> str:
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(f'create database "{name}"')
    return cluster.conninfo(name)


def without_password(conninfo: str) -> str:
    return make_conninfo("", **{**conninfo_to_dict(conninfo), "password": None})


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PgChangeError, RuntimeError, OSError, httpx.HTTPError, psycopg.Error) as error:
        say(str(error))
        sys.exit(1)
