"""Run the relay as a process: check the command's arguments, and serve until a signal."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.topology.auth import read_users
from airflow_pgchange.topology.catalogue import Catalogue
from airflow_pgchange.topology.connection import Limits
from airflow_pgchange.topology.encryption import Encryption, load_encryption
from airflow_pgchange.topology.relay import Relay

SPARE = 100
"""Maximum number of open files besides the clients' sockets, with ``REFUSALS`` sockets of clients over the limit."""


def run(
    conninfo: str,
    listen: str,
    *,
    users: Path | None,
    trust: bool = False,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    require_tls: bool = False,
    limits: Limits = Limits(),  # noqa: B008
) -> None:
    """Run a relay until SIGTERM or SIGINT.

    Raises InvalidArgument for unusable arguments, and the errors of ``Relay.serve``.
    """
    host, port = _address(listen)
    if (users is None) != trust:
        raise InvalidArgument(
            "say who may connect: either --users with a file of verifiers, or --trust for everybody"
        )
    verifiers = None if users is None else read_users(users)
    encryption = _encryption(tls_cert, tls_key, require_tls)
    _make_room(limits.max_clients)
    asyncio.run(_run(Relay(Catalogue(conninfo), verifiers, encryption, limits), host, port))


async def _run(relay: Relay, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await relay.serve(host, port, stop)
    except OSError as error:
        raise InvalidArgument(f"nothing can listen on {host}:{port}: {error}") from error


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise InvalidArgument(
            f"{listen!r} is not an address to listen on: write it as 127.0.0.1:4327 or [::1]:4327"
        )
    return host.strip("[]"), int(port)


def _make_room(clients: int) -> None:
    """Raise the soft limit of open files so that each client can have a socket."""
    needed, (soft, hard) = clients + SPARE, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InvalidArgument(
            f"this process may have {hard} files open, and {clients} clients need {needed}: raise the limit "
            f"(`ulimit -Hn`), or give --max-clients {max(1, hard - SPARE)}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _encryption(tls_cert: Path | None, tls_key: Path | None, required: bool) -> Encryption | None:
    if tls_cert is None and tls_key is None:
        if required:
            raise InvalidArgument("--require-tls needs --tls-cert and --tls-key")
        return None
    if tls_cert is None or tls_key is None:
        raise InvalidArgument("TLS needs both --tls-cert and --tls-key")
    return load_encryption(tls_cert, tls_key, required=required)
