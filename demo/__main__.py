"""`make demo`: a week of real flights becomes commits, Spark batches in Airflow, and totals that must be exact.

DAYS (7) and WRITERS (4) say how much, DSN names a PostgreSQL of yours, KEEP=1 leaves all running at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange import schema
from airflow_pgchange.feeds import CommitFeed, watching
from demo import flights
from demo.airflow import LocalAirflow
from demo.postgres import Cluster, embedded_binaries

FEED = CommitFeed(consumer_id="route_delay", branch_id=0)
DAG = "flight_delays"
PATIENCE = 240.0
"""Seconds without any progress after which the demo gives up."""


@dataclass
class Progress:
    """How many movements the writers have committed."""

    total: int
    committed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, movements: int) -> None:
        with self.lock:
            self.committed += movements


def main() -> int:
    days, writers = int(os.environ.get("DAYS", "7")), int(os.environ.get("WRITERS", "4"))
    if not 1 <= days <= 365 or writers < 1:
        print("DAYS is from 1 to 365, WRITERS at least 1")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as running:
        say("starting PostgreSQL" if "DSN" not in os.environ else "using your PostgreSQL")
        cluster = Cluster.create(embedded_binaries())
        running.callback(cluster.remove)
        database = os.environ.get("DSN") or new_database(cluster, "airline")
        prepare(database)
        say("reading the flights of 2013")
        rows = flights.movements(days)
        home = Path(tempfile.mkdtemp(prefix="pgchange-airflow-"))
        running.callback(shutil.rmtree, home, ignore_errors=True)
        airflow = LocalAirflow(
            home,
            sqlalchemy_url(new_database(cluster, "airflow")),
            Path(__file__).parent.parent / "dags",
            {
                "airline": airflow_connection(database),
                "spark_default": {"conn_type": "spark", "host": "local[2]"},
            },
        )
        say("starting Airflow: API server, scheduler, DAG processor and triggerer")
        running.enter_context(airflow)
        airflow.unpause(DAG)
        wait_for_watcher(database)
        good = play(airflow, database, rows, writers, days)
        if os.environ.get("KEEP") == "1":
            say(f"Airflow is at {airflow.url}, user {airflow.user}, password {airflow.password}")
            say(f"the database is at {database}")
            say("everything runs until you press Ctrl-C")
            signal.pause()
        say("stopping")
    return 0 if good else 1


def play(airflow: LocalAirflow, database: str, rows: list[flights.Row], writers: int, days: int) -> bool:
    """Replay the movements, follow them to the result, and compare it with the file."""
    progress = Progress(len(rows))
    say(f"{len(rows):,} departures, arrivals and cancellations of {days} days, by {writers} writers")
    began = time.monotonic()
    replay = threading.Thread(
        target=flights.replay, args=(database, rows, writers, progress.add), daemon=True
    )
    replay.start()
    with psycopg.connect(database, autocommit=True) as connection:
        last_commit = follow(airflow, connection, replay, progress)
        done = time.monotonic()
        batches = watching.position(connection, FEED)["version"]
        result = connection.execute(
            "select * from public.route_delay order by carrier, origin, dest"
        ).fetchall()
    wanted = flights.expected(days)
    show(result, wanted)
    same = result == wanted
    noun = "batch" if batches == 1 else "batches"
    say(
        f"{len(rows):,} changes in {batches} {noun}, {len(rows) / (done - began):,.0f} changes a second, "
        f"{done - last_commit:.1f} s from the last commit to the result"
    )
    say("the result equals the file to the last flight" if same else "THE RESULT DIFFERS FROM THE FILE")
    return same


def follow(
    airflow: LocalAirflow, connection: psycopg.Connection[Any], replay: threading.Thread, progress: Progress
) -> float:
    """Print a line every few seconds until everything is processed; returns when the last commit was seen."""
    last_commit = last_change = time.monotonic()
    processed, spoken = -1, 0.0
    while True:
        writing = replay.is_alive()
        if writing:
            last_commit = time.monotonic()
        committed = progress.committed
        lag = watching.lag(connection, connection, FEED, 1_000_000)
        if committed - lag.ready > processed:
            processed, last_change = committed - lag.ready, time.monotonic()
        if time.monotonic() - spoken > 3:
            spoken = time.monotonic()
            say(
                f"committed {progress.committed:>9,}   processed {max(processed, 0):>9,}   ready {lag.ready:>9,}"
            )
        if not writing and progress.committed < progress.total:
            raise RuntimeError("a writer failed: not every movement was committed")
        if not writing and lag.ready == 0:
            return last_commit
        failed = [run for run in airflow.runs(DAG) if run["state"] == "failed"]
        if failed or time.monotonic() - last_change > PATIENCE:
            raise RuntimeError(
                f"the DAG made no progress; the end of its log:\n{airflow.task_logs(DAG)[-4000:]}"
            )
        time.sleep(0.2)


def wait_for_watcher(database: str) -> None:
    """Return once the triggerer watches the feed, so that the figures are those of a pipeline at work."""
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


def show(result: list[flights.Row], wanted: list[flights.Row]) -> None:
    """The five busiest routes beside the figures from the file, and every row that differs."""
    known = {row[:3]: row for row in result}
    busiest = sorted(wanted, key=lambda row: -row[3])[:5]
    wrong = [row for row in wanted if known.get(row[:3]) != row]
    print(f"\n{'route':<14}{'departures':>22}{'arrivals':>20}{'cancelled':>14}{'delay at departure':>24}")
    for row in busiest + [row for row in wrong if row not in busiest][:10]:
        ours = known.get(row[:3], (None,) * 8)
        cells = [f"{ours[n]} / {row[n]}" for n in (3, 4, 5, 6)]
        print(f"{' '.join(row[:3]):<14}{cells[0]:>22}{cells[1]:>20}{cells[2]:>14}{cells[3]:>24}")
    print(f"(result / straight from the file; {len(wanted) - len(wrong)} of {len(wanted)} rows agree)\n")


def prepare(database: str) -> None:
    """Our schemas, the tables of the demo, and the tracking."""
    with psycopg.connect(database, autocommit=True) as connection:
        schema.install(connection)
        connection.execute(flights.DDL)
        connection.execute("select revision.track('public.movement', branch_id => '0')")
        if connection.execute("select exists (select from public.movement)").fetchone() == (True,):
            raise SystemExit("public.movement is not empty: give the demo a database of its own")


def new_database(cluster: Cluster, name: str) -> str:
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(f'create database "{name}"')
    return cluster.conninfo(name)


def airflow_connection(conninfo: str) -> dict[str, Any]:
    """An Airflow connection of type postgres."""
    given = conninfo_to_dict(make_conninfo(conninfo))
    names = {"host": "host", "port": "port", "user": "login", "password": "password", "dbname": "schema"}
    extra = {key: value for key, value in given.items() if key not in names}
    fields = {theirs: given[ours] for ours, theirs in names.items() if given.get(ours) is not None}
    if "port" in fields:
        fields["port"] = int(str(fields["port"]))
    return {"conn_type": "postgres", **fields, "extra": extra}


def sqlalchemy_url(conninfo: str) -> str:
    given = conninfo_to_dict(conninfo)
    return (
        f"postgresql+psycopg2://{quote(str(given['user']))}@{given['host']}:{given['port']}/{given['dbname']}"
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        say(str(error))
        sys.exit(1)
