"""The cost of the capture for a writer, compared with the same inserts without a trigger: CPU of the backend."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import psycopg

from tests.benchmarks.measure import Report, cpu_of, ratio, section, side_by_side
from tests.tubes import attach, make, one

GOALS = {1: 1.6, 100: 2.3, 10_000: 3.0}
STATEMENTS = {1: 10_000, 100: 1_000, 10_000: 20}
BIGINT = "id bigint generated always as identity primary key"
KEYS = {
    "uuid": ("id uuid default gen_random_uuid() primary key", ["uuid"]),
    "two columns": (
        "tenant uuid default gen_random_uuid(), no bigint generated always as identity, primary key (tenant, no)",
        ["uuid", "bigint"],
    ),
}
OTHER = 1.5
"""The largest cost of the capture of another key, as a multiple of the cost for a bigint."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        with section("capture / no trigger, inserts"):
            for name in ("plain", "tracked", "expressed"):
                _make(connection, name, BIGINT)
            connection.execute("select revision.track('tracked')")
            connection.execute("select revision.track('expressed', branch_id => '0 * kind')")
            for rows, most in GOALS.items():
                plain, tracked, expressed = side_by_side(
                    5, *(_inserting(connection, name, rows) for name in ("plain", "tracked", "expressed"))
                )
                report.say(f"{rows:,} rows a statement", ratio(tracked, plain), "x", most=most)
                report.say(f"{rows:,} rows a statement, branch by expression", ratio(expressed, plain), "x")
        for key, (columns, types) in KEYS.items():
            with section(f"what capture adds for a key of {key} / for a bigint"):
                _other_key(connection, report, key.split()[0], columns)
            with section(f"what the capture of a tube adds for a key of {key} / for a bigint"):
                _other_ids(connection, report, key.split()[0], columns, types)


def _make(connection: psycopg.Connection, name: str, key: str) -> None:
    connection.execute(
        f"create table {name} ({key}, kind bigint, flight_date date, carrier text, flight integer, origin text, "
        "dest text, at timestamptz, delay integer)"
    )


def _inserting(connection: psycopg.Connection, name: str, rows: int) -> Callable[[], float]:
    query = (
        f"insert into {name} (kind, flight_date, carrier, flight, origin, dest, at, delay) "
        "select g, '2013-01-01', 'UA', 1545, 'EWR', 'IAH', '2013-01-01 05:17-05', 2 "
        f"from generate_series(1, {rows}) as g"
    )

    def work() -> None:
        for _ in range(STATEMENTS[rows]):
            connection.execute(query)

    return lambda: cpu_of(connection, work)


def _compare(connection: psycopg.Connection, report: Report, *tables: str) -> None:
    """Report what the capture adds.

    ``tables`` are a plain and a captured table with a bigint key, and both with another key.
    """
    for rows in GOALS:
        figures = side_by_side(5, *(_inserting(connection, table, rows) for table in tables))
        plain, tracked, other, captured = (statistics.median(each) for each in figures)
        micros = 1e6 / STATEMENTS[rows]
        report.say(f"{rows:,} rows a statement, bigint", (tracked - plain) * micros, "us")
        report.say(f"{rows:,} rows a statement", (captured - other) * micros, "us")
        report.say(f"{rows:,} rows a statement", (captured - other) / (tracked - plain), "x", most=OTHER)


def _other_ids(
    connection: psycopg.Connection, report: Report, name: str, columns: str, types: list[str]
) -> None:
    """Report the same figures for tubes, with new tables."""
    tables: list[str] = []
    for key, its_columns, its_types in (("number", BIGINT, ["bigint"]), (name, columns, types)):
        untouched, touching = f"untouched_{key}_{name}", f"touching_{key}_{name}"
        _make(connection, untouched, its_columns)
        _make(connection, touching, its_columns)
        make(connection, f"tube_{key}_{name}", key=its_types)
        attach(connection, touching, f"tube_{key}_{name}")
        tables += [untouched, touching]
    _compare(connection, report, *tables)
    size = f"select pg_column_size(p) from tube_{name}_{name} p order by cardinality(ids) desc limit 1"
    report.say("a full pod", float(one(connection, size)), "bytes")


def _other_key(connection: psycopg.Connection, report: Report, name: str, columns: str) -> None:
    """The plain tables grow like the tracked tables, because random keys make a growing index more expensive."""
    _make(connection, f"plain_{name}", columns)
    _make(connection, f"tracked_{name}", columns)
    branch = one(connection, f"select revision.track('tracked_{name}')")
    _compare(connection, report, "plain", "tracked", f"plain_{name}", f"tracked_{name}")
    size = (
        "select pg_column_size(q) from revision.commit_queue q where branch_id = %s order by id desc limit 1"
    )
    report.say("a commit", float(one(connection, size, branch)), "bytes")
