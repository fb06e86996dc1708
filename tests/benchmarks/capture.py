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
                f"create table {name} (id bigint generated always as identity primary key, kind int, note text)"
            )
        connection.execute("select revision.track('tracked')")
        connection.execute("select revision.track('expressed', branch_id => '0::bigint * kind')")
        for rows, most in GOALS.items():

            def insert(name: str, rows: int = rows) -> float:
                query = f"insert into {name} (kind, note) select g, 'a note of some length' from generate_series(1, {rows}) g"

                def work() -> None:
                    for _ in range(STATEMENTS[rows]):
                        connection.execute(query)

                return cpu_of(connection, work)

            plain, tracked, expressed = side_by_side(
                5, lambda: insert("plain"), lambda: insert("tracked"), lambda: insert("expressed")
            )
            report.say(f"{rows:,} rows a statement", ratio(tracked, plain), "x", most=most)
            report.say(f"{rows:,} rows a statement, branch by expression", ratio(expressed, plain), "x")
