"""The SQL functions that users may call, and the rights that each ``grant_`` function gives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from airflow_pgchange import errors
from airflow_pgchange.admin import schema
from airflow_pgchange.feeds.error_translation import BY_SQLSTATE
from airflow_pgchange.feeds.grants import Role, declared
from demo.postgres import Cluster, system_binaries

TITLES = {
    "pgchange": "All feeds",
    "revision": "Commit queue: tracking",
    "pubsub": "Commit queue: consumers",
    "tube": "Tubes",
    "pgmb": "Event log",
    "mbus": "Message queues and sagas",
    "topology": "Topology",
}
FUNCTIONS = """
select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), p.prokind = 'p',
       obj_description(p.oid, 'pg_proc')
from pg_proc as p
where p.pronamespace = %s::regnamespace and p.prorettype <> 'trigger'::regtype
  and obj_description(p.oid, 'pg_proc') not like 'Internal to schema%%'
  and (p.proname like 'grant\\_%%' or exists (
      select from aclexplode(p.proacl) as a where a.grantee <> p.proowner and a.privilege_type = 'EXECUTE'))
order by p.proname, p.pronargs
"""
WIDTH = 80
"""The number of characters of a line that the site shows without scrolling."""
EVERYBODY = "reader_of_the_docs"


def functions() -> str:
    """Return a section for each schema, with its functions that some role may be granted, as in a new database."""
    cluster = Cluster.create(system_binaries())
    try:
        with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
            schema.install(connection)
            connection.execute(f"create role {EVERYBODY}")
            for name, role in _roles(connection):
                connection.execute(f"select {name}.{role}('{EVERYBODY}')")
            return "\n".join(line for name in TITLES for line in _section(connection, name))
    finally:
        cluster.remove()


def codes() -> str:
    """Return a row for each SQLSTATE that our functions raise, with the corresponding public exception in Python."""
    rows = []
    for code, error in BY_SQLSTATE.items():
        if code.startswith("PC"):
            name = next(each.__name__ for each in error.__mro__ if each.__name__ in errors.__all__)
            link = f"[{name}](python/errors.md#{errors.__name__}.{name})"
            rows.append(f"| `{code}` | {link} | {_first_line(error)} |")
    return "\n".join(["| code | error in Python | meaning |", "|---|---|---|", *rows])


def _first_line(error: type[Exception]) -> str:
    return (inspect.getdoc(error) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _roles(connection: psycopg.Connection[Any]) -> Sequence[tuple[str, str]]:
    return connection.execute(
        "select pronamespace::regnamespace::text, proname from pg_proc where pronamespace::regnamespace::text = any (%s) "
        "and proname like 'grant\\_%%'",
        [list(TITLES)],
    ).fetchall()


def _section(connection: psycopg.Connection[Any], name: str) -> Iterator[str]:
    yield f"## {TITLES[name]}: `{name}`\n"
    for function, arguments, result, is_procedure, comment in connection.execute(FUNCTIONS, [name]):
        call = "call " if is_procedure else ""
        returned = f" returns {result}" if result else ""
        text = f"{call}{name}.{function}({arguments}){returned}"
        if len(text) > WIDTH:
            inside = arguments.replace(", ", ",\n    ")
            text = f"{call}{name}.{function}(\n    {inside}\n){returned}"
        yield f"### {name}.{function}\n\n```sql\n{text}\n```\n\n{comment}\n"


def grants() -> str:
    """Return the rights that each ``grant_`` function grants, as its schema declares them."""
    return "\n".join(line for role in declared() for line in _grant(role))


def _grant(role: Role) -> Iterator[str]:
    yield f"### {role.schema}.grant_{role.name}\n\n{role.told}\n"
    if role.includes:
        yield f"- the rights of {', '.join(f'`{each}`' for each in role.includes)}"
    yield f"- `usage` on schema `{role.schema}`"
    for each in role.objects:
        yield f"- `{each}`"
    if role.functions:
        listed = ", ".join(f"`{each}`" for each in role.functions)
        yield f"- `execute` on {'all functions of the schema' if listed == '`*`' else listed}"
    yield ""
