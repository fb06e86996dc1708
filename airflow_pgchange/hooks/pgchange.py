"""From an Airflow connection to a connection of ours."""

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
"""The extra by which Airflow's own PostgreSQL hook signs in with a cloud's token in place of a password."""
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
"""Extras of that hook that are not options of libpq."""


class PgChangeHook(BaseHook):
    """A PostgreSQL connection for feeds, from any Airflow connection of type ``postgres``.

    Host may list several servers (``db1,db2`` or ``db1:5432,db2:5433``); every extra goes to libpq
    (``sslmode``, ``sslrootcert``, ``target_session_attrs``, ``options``, ``service``, ...). A string that
    ``conninfo`` returns holds the password: it is for libpq, never for a log.
    """

    default_conn_name: ClassVar[str] = "postgres_default"

    def __init__(self, postgres_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id

    def conninfo(self) -> str:
        """The connection as a libpq string. Raises InvalidArgument for a connection of another type, and for an extra
        that is not an option of libpq."""
        connection = self.get_connection(self.postgres_conn_id)
        extra = connection.extra_dejson
        return conninfo_of(connection, extra, _signed_in(connection) if extra.get(SIGN_IN) else {})

    async def aconninfo(self) -> str:
        """The same for the event loop."""
        connection = await self.aget_connection(self.postgres_conn_id)
        # Secrets backends may hand over the server's connection class, which has no such method.
        extra = (
            await connection.aextra_dejson()
            if hasattr(connection, "aextra_dejson")
            else connection.extra_dejson
        )
        # Getting a token may ask a server of the cloud, and reads another Airflow connection.
        signed_in = await sync_to_async(_signed_in)(connection) if extra.get(SIGN_IN) else {}
        return conninfo_of(connection, extra, signed_in)

    def get_conn(self, *, primary: bool = False) -> psycopg.Connection[Any]:
        """An open connection in autocommit; ``primary`` asks for a server that takes writes. Raises
        ServerUnavailable.
        """
        return connect(self.conninfo(), primary=primary)

    async def aget_conn(self, *, primary: bool = False) -> psycopg.AsyncConnection[Any]:
        """The same for the event loop."""
        return await connect_async(await self.aconninfo(), primary=primary)


def both(
    postgres_conn_id: str, source_conn_id: str | None, *, primary: bool = True
) -> AbstractContextManager[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Connections to the database of the results and to that of the changes, by the names of Airflow's."""
    source = PgChangeHook(source_conn_id).conninfo() if source_conn_id else None
    return both_databases(PgChangeHook(postgres_conn_id).conninfo(), source, primary=primary)


def conninfo_of(connection: Connection, extra: Mapping[str, Any], signed_in: SignIn | None = None) -> str:
    """An Airflow connection as a libpq string. ``signed_in``: the user, the password and the port by which to sign in
    with a cloud's token."""
    name = connection.conn_id
    if connection.conn_type != "postgres":
        raise InvalidArgument(
            f"connection {name} is of type {connection.conn_type}: give one of type postgres"
        )
    hosts, ports = _servers(connection.host, connection.port)
    given = {
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
        known = {key: value for key, value in given.items() if value not in (None, "")}
        return make_conninfo("", **{**known, **options})
    except psycopg.ProgrammingError as error:
        raise InvalidArgument(
            f"connection {name}: {str(error).strip()}; "
            f"its extras must be options of libpq ({', '.join(options)})"
        ) from None


def _signed_in(connection: Connection) -> SignIn:
    """The user, the token as a password, and the port, as Airflow's own PostgreSQL hook gets them from the cloud."""
    # Imported here, because few connections need it, and it imports SQLAlchemy.
    from airflow.providers.postgres.hooks.postgres import PostgresHook  # noqa: PLC0415

    if "," in (connection.host or ""):
        raise InvalidArgument(
            f"connection {connection.conn_id}: a token is for one server, and the connection has several hosts: "
            f"name one, such as the address of the cluster's writer, or take the extra {SIGN_IN} away"
        )
    hook = PostgresHook(postgres_conn_id=connection.conn_id)

    def ask() -> SignIn:
        login, token, port = hook.get_iam_token(connection)
        mask_secret(token)
        return {"user": login, "password": token, "port": port}

    # A token is good for one user of one server, which a person may change in the connection.
    known_by = repr(
        (connection.conn_id, connection.host, connection.port, connection.login, connection.extra)
    )
    return sign_in(known_by, ask)


def _servers(host: str | None, port: int | None) -> tuple[str | None, str | None]:
    """``a:1,b:2`` as libpq's two lists; a part with more than one colon is an IPv6 address."""
    fallback = None if port is None else str(port)
    parts = [part.strip() for part in (host or "").split(",")]
    if not any(part.count(":") == 1 for part in parts):
        return host, fallback
    servers = [part.split(":") if part.count(":") == 1 else [part, fallback or "5432"] for part in parts]
    return ",".join(name for name, _ in servers), ",".join(number for _, number in servers)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
