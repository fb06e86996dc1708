"""Functions that the commands of ``airflow-pgchange`` share."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import psycopg
from airflow.cli.simple_table import AirflowConsole
from airflow.models.connection import Connection
from airflow.providers.common.compat.sdk import AirflowNotFoundException
from airflow.utils.cli import suppress_logs_and_warning
from airflow.utils.providers_configuration_loader import providers_configuration_loaded
from airflow.utils.session import create_session
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from airflow_pgchange.errors import InvalidArgument, PgChangeError
from airflow_pgchange.feeds.connections import both as both_databases
from airflow_pgchange.feeds.connections import connect, keep_open
from airflow_pgchange.feeds.error_text import without_secrets
from airflow_pgchange.feeds.error_translation import shorten
from airflow_pgchange.hooks.pgchange import conninfo_of

Rows = Sequence[Mapping[str, Any]]
Database = psycopg.Connection[Any]

DONE = "Done."
PROCESS_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"
"""The environment variable by which Airflow's own commands choose where their hooks look for connections."""


def command(
    nothing: str, *, bad: Callable[[Rows], bool] = lambda rows: False, failure: int = 1
) -> Callable[[Callable[[Namespace], Rows]], Callable[[Namespace], None]]:
    """Print the rows that a command returns, or ``nothing`` if there are none.

    The process ends with code 1 if the rows are ``bad``. If the command fails, it prints the error and the process ends
    with code ``failure``.
    """

    def decorate(function: Callable[[Namespace], Rows]) -> Callable[[Namespace], None]:
        @wraps(function)
        @suppress_logs_and_warning
        @providers_configuration_loaded
        def run(args: Namespace) -> None:
            try:
                rows = function(args)
            except (PgChangeError, psycopg.Error) as error:
                shorten(error)
                message = f"{type(error).__name__}: {str(error).strip()}"
                if failure == 1:
                    # If the exit code is a text, Python prints it and ends with code 1.
                    raise SystemExit(message) from error
                print(message, file=sys.stderr)
                raise SystemExit(failure) from error
            if args.output == "json":
                print(json.dumps(rows, default=str))
            elif rows:
                AirflowConsole().print_as(data=[shown(row) for row in rows], output=args.output)
            else:
                print(nothing, file=sys.stderr)
            if bad(rows):
                raise SystemExit(1)

        return run

    return decorate


def database(args: Namespace) -> Database:
    """Connect to the database that the options name."""
    connection = connect(conninfo(args), primary=True)
    keep_open(connection)
    return connection


def conninfo(args: Namespace) -> str:
    """Return the connection string of the database that the options name."""
    return _conninfo(args.postgres_conn_id, args.dsn, "--postgres-conn-id", "--dsn")


@contextmanager
def both(args: Namespace) -> Iterator[tuple[Database, Database]]:
    """Connect to the database of the results and to that of the changes.

    Both are the same connection unless the options name a source.
    """
    source = None
    if args.source_conn_id is not None or args.source_dsn is not None:
        source = _conninfo(args.source_conn_id, args.source_dsn, "--source-conn-id", "--source-dsn")
    with both_databases(conninfo(args), source) as opened:
        for connection in opened:
            keep_open(connection)
        yield opened


@contextmanager
def metadata(advice: str) -> Iterator[Session]:
    """Open a session of Airflow's own database. Raises InvalidArgument with ``advice`` if it does not answer."""
    try:
        with create_session() as session:
            yield session
    except DBAPIError as error:
        reason = without_secrets(str(error.orig).strip(), ())
        raise InvalidArgument(f"Airflow's own database cannot be read: {reason}; {advice}") from error


@contextmanager
def stored_connections() -> Iterator[None]:
    """Let hooks read connections from Airflow's own database, as ``airflow connections test`` does.

    Outside of a task and of a server, hooks read only the environment and a configured secrets backend.
    """
    former = os.environ.get(PROCESS_CONTEXT)
    os.environ[PROCESS_CONTEXT] = "server"
    try:
        yield
    finally:
        if former is None:
            del os.environ[PROCESS_CONTEXT]
        else:
            os.environ[PROCESS_CONTEXT] = former


def _conninfo(conn_id: str | None, dsn: str | None, *options: str) -> str:
    if (conn_id is None) == (dsn is None):
        raise InvalidArgument(f"say which database: either {options[0]} or {options[1]}")
    if dsn is not None:
        return _checked(dsn, options[1])
    return conninfo_by_name(str(conn_id), f", or say {options[1]}")


def conninfo_by_name(conn_id: str, instead: str = "") -> str:
    """Return the connection string of an Airflow connection. Raises InvalidArgument if it does not exist."""
    try:
        connection = Connection.get_connection_from_secrets(conn_id)
    except AirflowNotFoundException as error:
        raise InvalidArgument(
            f"Airflow has no connection {conn_id!r}: `airflow connections list` shows them, "
            f"`airflow connections add` makes one{instead}"
        ) from error
    return conninfo_of(connection, connection.extra_dejson)


def _checked(dsn: str, option: str) -> str:
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # Do not pass psycopg's error on: it quotes the unreadable part, for example the rest of a password after a space.
        raise InvalidArgument(
            f"{option} is not a connection string: write it as 'host=... dbname=... user=...' or as postgresql://..., "
            "and a value with spaces in single quotes"
        ) from None
    return dsn


def confirm(args: Namespace, warning: str) -> None:
    """Ask the user to confirm, unless ``--yes`` is given. Raises SystemExit without a confirmation."""
    if args.yes:
        return
    if not sys.stdin.isatty():
        raise SystemExit(f"{warning} Nothing was changed: add --yes to do it.")
    print(warning, file=sys.stderr)
    if input("Continue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SystemExit("Nothing was changed.")


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of a row to types that a table can show."""
    plain = (str, int, float, bool, type(None))
    return {key: value if isinstance(value, plain) else str(value) for key, value in row.items()}
