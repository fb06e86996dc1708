"""The hook: open PostgreSQL connections from Airflow connections."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import psycopg
from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret
from asgiref.sync import sync_to_async
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.connections import both as both_databases
from airflow_pgchange.feeds.connections import connect, connect_async
from airflow_pgchange.feeds.tokens import SignIn, sign_in

SIGN_IN = "iam"
"""The extra by which Airflow's own PostgreSQL hook signs in with a token of a cloud instead of a password."""
NOT_LIBPQ = {
    SIGN_IN,
    "redshift",
    "redshift-serverless",
    "azure_conn_id",
    "cursor",
    "sqlalchemy_scheme",
    "sqlalchemy_query",
    "openlineage_namespace",
    "aws_conn_id",
    "cluster-identifier",
    "workgroup-name",
}
"""Extras of Airflow's own PostgreSQL hook that are not options of libpq."""


class PgChangeHook(BaseHook):
    """A PostgreSQL connection for feeds, from any Airflow connection of type ``postgres``.

    The host may list several servers (``db1,db2`` or ``db1:5432,db2:5433``). Every extra goes to libpq (``sslmode``,
    ``sslrootcert``, ``target_session_attrs``, ``options``, ``service``, ...). Never log the result of ``conninfo``: it
    has the password.
    """

    default_conn_name: ClassVar[str] = "postgres_default"

    def __init__(self, postgres_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id

    def conninfo(self) -> str:
        """Return the connection as a libpq string.

        Raises InvalidArgument for a connection of another type, and for an extra that is not an option of libpq.
        """
        connection = self.get_connection(self.postgres_conn_id)
        extra = connection.extra_dejson
        return conninfo_of(connection, extra, _signed_in(connection) if extra.get(SIGN_IN) else {})

    async def aconninfo(self) -> str:
        """Return the connection as a libpq string, without blocking the event loop. Raises as ``conninfo`` does."""
        connection = await self.aget_connection(self.postgres_conn_id)
        # Secrets backends may return the connection class of Airflow's server, which lacks this method.
        extra = (
            await connection.aextra_dejson()
            if hasattr(connection, "aextra_dejson")
            else connection.extra_dejson
        )
        # Use a thread: getting a token reads another Airflow connection, and may query a server of the cloud.
        signed_in = await sync_to_async(_signed_in)(connection) if extra.get(SIGN_IN) else {}
        return conninfo_of(connection, extra, signed_in)

    def get_conn(self, *, primary: bool = False) -> psycopg.Connection[Any]:
        """Open a connection in autocommit mode. With ``primary``, to a server that accepts writes.

        Raises ServerUnavailable.
        """
        return connect(self.conninfo(), primary=primary)

    async def aget_conn(self, *, primary: bool = False) -> psycopg.AsyncConnection[Any]:
        """Open an asynchronous connection in autocommit mode. With ``primary``, to a server that accepts writes.

        Raises ServerUnavailable.
        """
        return await connect_async(await self.aconninfo(), primary=primary)


def both(
    postgres_conn_id: str, source_conn_id: str | None, *, primary: bool = True
) -> AbstractContextManager[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Connect to the databases of the results and of the changes, by Airflow connections.

    Without ``source_conn_id`` they are the same database.
    """
    source = PgChangeHook(source_conn_id).conninfo() if source_conn_id else None
    return both_databases(PgChangeHook(postgres_conn_id).conninfo(), source, primary=primary)


def conninfo_of(connection: Connection, extra: Mapping[str, Any], signed_in: SignIn | None = None) -> str:
    """Return an Airflow connection as a libpq string. ``signed_in``: the user, the token and the port for a cloud.

    Raises InvalidArgument for a connection of another type, and for an extra that is not an option of libpq.
    """
    name = connection.conn_id
    if connection.conn_type != "postgres":
        raise InvalidArgument(
            f"connection {name} is of type {connection.conn_type}: give one of type postgres"
        )
    hosts, ports = _servers(connection.host, connection.port)
    fields = {
        "host": hosts,
        "port": ports,
        "user": connection.login,
        "password": connection.password,
        "dbname": connection.schema,
        **(signed_in or {}),
    }
    options = {
        key: _text(value) for key, value in extra.items() if key not in NOT_LIBPQ and value not in (None, "")
    }
    try:
        set_fields = {key: value for key, value in fields.items() if value not in (None, "")}
        return make_conninfo("", **{**set_fields, **options})
    except psycopg.ProgrammingError as error:
        raise InvalidArgument(
            f"connection {name}: {str(error).strip()}; "
            f"its extras must be options of libpq ({', '.join(options)})"
        ) from None


def _signed_in(connection: Connection) -> SignIn:
    """Return the user, the token as the password, and the port. Airflow's own PostgreSQL hook gets them from the cloud.

    Raises InvalidArgument if the connection has several hosts.
    """
    # Import it only here: few connections need it, and it imports SQLAlchemy.
    from airflow.providers.postgres.hooks.postgres import PostgresHook  # noqa: PLC0415

    if "," in (connection.host or ""):
        raise InvalidArgument(
            f"connection {connection.conn_id}: a token is for one server, and the connection has several hosts. "
            f"Give one host, such as the address of the cluster's writer, or remove the extra {SIGN_IN}"
        )
    hook = PostgresHook(postgres_conn_id=connection.conn_id)

    def ask() -> SignIn:
        login, token, port = hook.get_iam_token(connection)
        mask_secret(token)
        return {"user": login, "password": token, "port": port}

    # A token is valid for one user of one server, so the cached token must not be used after an edit of these fields.
    cache_key = repr(
        (connection.conn_id, connection.host, connection.port, connection.login, connection.extra)
    )
    return sign_in(cache_key, ask)


def _servers(host: str | None, port: int | None) -> tuple[str | None, str | None]:
    """Return ``a:1,b:2`` as the two lists of libpq, hosts and ports. A part with several colons is an IPv6 address."""
    fallback = None if port is None else str(port)
    parts = [part.strip() for part in (host or "").split(",")]
    if not any(part.count(":") == 1 for part in parts):
        return host, fallback
    servers = [part.split(":") if part.count(":") == 1 else [part, fallback or "5432"] for part in parts]
    return ",".join(name for name, _ in servers), ",".join(number for _, number in servers)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
