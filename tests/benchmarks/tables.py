"""The cost of thousands of captured tables: the server's CPU for each, and the memory of a session that writes to
them."""

from __future__ import annotations

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin import schema
from tests.benchmarks.measure import Report, cpu_of, section

FEW, MANY = 100, 800
"""The numbers of captured tables."""
GROWTH = 1.3
"""The goal: the maximum CPU time with many tables, as a multiple of that with few tables."""
WRITTEN = 200
"""The number of tables of each kind to which a session writes."""
STATEMENTS = {
    "insert": "insert into {0} select coalesce(max(id), 0) + 1, 1 from {0}",
    "update": "update {0} set v = 2",
    "delete": "delete from {0} where id = (select max(id) from {0})",
}
EXECUTIONS = 8
"""The number of executions of a statement. PostgreSQL keeps a plan with parameters from the sixth execution on."""
MEMORY = {
    ("tracked", "insert"): 1.5,
    ("tubed", "insert"): 2.1,
    ("tubed", "update"): 2.6,
    ("tubed", "delete"): 2.0,
}
"""The maximum memory, as a multiple of that of a trigger with a single insert."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        growth(connection, conninfo, report)
        memory(connection, conninfo, report)


def growth(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure the operations that are done for each captured table, with few and with many tables."""
    with section(f"CPU a table, {MANY} captured tables / {FEW}"):
        few, many = (a_table(connection, conninfo, count) for count in (FEW, MANY))
        for name, cost in few.items():
            report.say(f"{name}, {FEW} tables", cost, "ms CPU")
            report.say(name, many[name] / cost, "x", most=GROWTH)


def a_table(server: psycopg.Connection, conninfo: str, count: int) -> dict[str, float]:
    """Return the milliseconds of the server's CPU for each table, in a database with ``count`` tables."""
    name = f"tables_{count}"
    server.execute(f"create database {name}")
    with psycopg.connect(make_conninfo(conninfo, dbname=name), autocommit=True) as connection:
        schema.install(connection)
        connection.execute("select tube.tube_ensure_exists('tables')")
        for number in range(count):
            connection.execute(f"create table table_{number} (id bigint primary key, v integer)")

        def last_tables(query: str) -> float:
            """Execute a query for all tables. Return the cost for the last of them."""
            for number in range(count - FEW // 2):
                connection.execute(query, [f"table_{number}"])

            def rest() -> None:
                for number in range(count - FEW // 2, count):
                    connection.execute(query, [f"table_{number}"])

            return cpu_of(connection, rest) / (FEW // 2) * 1000

        def all_tables(query: str) -> float:
            return cpu_of(connection, lambda: connection.execute(query)) / count * 1000

        costs = {
            "track()": last_tables("select revision.track(%s)"),
            "tube_table_ensure_attached()": last_tables(
                "select tube.tube_table_ensure_attached('tables', %s, 0)"
            ),
            "health()": all_tables("select * from pgchange.health()"),
            "a change of the predicate": all_tables(
                "select tube.tube_ensure_exists('tables', predicate => 'v > 0')"
            ),
        }
    with psycopg.connect(make_conninfo(conninfo, dbname=name), autocommit=True) as connection:
        costs["uninstalling"] = cpu_of(connection, lambda: schema.uninstall(connection)) / count * 1000
    server.execute(f"drop database {name}")
    return costs


def memory(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure the memory that a session keeps for each table to which it writes, compared with a table without a
    trigger."""
    connection.execute("create table kept (id bigint)")
    connection.execute("select tube.tube_ensure_exists('written')")
    for number in range(WRITTEN):
        for sort in ("plain", "simple", "tracked", "tubed"):
            connection.execute(f"create table {sort}_{number} (id bigint primary key, v integer)")
        for op, rows in (("insert", "new"), ("update", "new"), ("delete", "old")):
            connection.execute(
                f"create function simple_{op}_{number}() returns trigger language plpgsql as "
                "'begin insert into kept select id from changed; return null; end'"
            )
            connection.execute(
                f"create trigger simple_{op} after {op} on simple_{number} referencing {rows} table as changed "
                f"for each statement execute function simple_{op}_{number}()"
            )
        connection.execute("select revision.track(%s)", [f"tracked_{number}"])
        connection.execute("select tube.tube_table_ensure_attached('written', %s)", [f"tubed_{number}"])
    with section("memory of a session for each table that it writes to / for a trigger that has one insert"):
        kept = {sort: session_memory(conninfo, sort) for sort in ("plain", "simple", "tracked", "tubed")}
        for (sort, op), goal in MEMORY.items():
            simple = kept["simple"][op] - kept["plain"][op]
            report.say(f"{op}, one insert", simple, "KB")
            report.say(
                f"{op} of a {sort} table", (kept[sort][op] - kept["plain"][op]) / simple, "x", most=goal
            )


def session_memory(conninfo: str, sort: str) -> dict[str, float]:
    """Return kilobytes for each table, by the kind of the first statement."""
    kept = {}
    for op, statement in STATEMENTS.items():
        with psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as session:
            before = used(session)
            for _ in range(EXECUTIONS):
                for number in range(WRITTEN):
                    session.execute(sql.SQL(statement).format(sql.Identifier(f"{sort}_{number}")))
            kept[op] = (used(session) - before) / WRITTEN / 1024
    return kept


def used(session: psycopg.Connection) -> int:
    """Bytes of the session's memory, without the contexts of this query.

    Of the cache of the catalogues only used bytes count: its blocks double, so that the last is megabytes of free space.
    """
    found = session.execute(
        "select sum(case when name = 'CacheMemoryContext' then used_bytes else total_bytes end)::bigint "
        "from pg_backend_memory_contexts where name <> all (%s)",
        [["ExecutorState", "ExprContext", "tuplestore tuples", "pg_get_backend_memory_contexts"]],
    ).fetchone()
    assert found is not None
    return int(found[0])
