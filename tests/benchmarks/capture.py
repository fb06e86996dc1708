"""What capture costs a writer, against the same inserts with no trigger: CPU of the backend."""

from __future__ import annotations

import psycopg

from tests.benchmarks.measure import Report, cpu_of, ratio, section, side_by_side

GOALS = {1: 1.6, 100: 2.3, 10_000: 3.0}
STATEMENTS = {1: 10_000, 100: 1_000, 10_000: 20}


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection, section("capture / no trigger, inserts"):
        for name in ("plain", "tracked", "expressed"):
            connection.execute(
                f"create table {name} (id bigint generated always as identity primary key, kind bigint, "
                "flight_date date, carrier text, flight integer, origin text, dest text, at timestamptz, delay integer)"
            )
        connection.execute("select revision.track('tracked')")
        connection.execute("select revision.track('expressed', branch_id => '0 * kind')")
        for rows, most in GOALS.items():

            def insert(name: str, rows: int = rows) -> float:
                query = (
                    f"insert into {name} (kind, flight_date, carrier, flight, origin, dest, at, delay) "
                    "select g, '2013-01-01', 'UA', 1545, 'EWR', 'IAH', '2013-01-01 05:17-05', 2 "
                    f"from generate_series(1, {rows}) as g"
                )

                def work() -> None:
                    for _ in range(STATEMENTS[rows]):
                        connection.execute(query)

                return cpu_of(connection, work)

            plain, tracked, expressed = side_by_side(
                5, lambda: insert("plain"), lambda: insert("tracked"), lambda: insert("expressed")
            )
            report.say(f"{rows:,} rows a statement", ratio(tracked, plain), "x", most=most)
            report.say(f"{rows:,} rows a statement, branch by expression", ratio(expressed, plain), "x")
