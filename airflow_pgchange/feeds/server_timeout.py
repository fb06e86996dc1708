"""How long a server may give no sign of life: the connection option ``tcp_user_timeout``, and values derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.watched_socket import Deadlines

OPTION = "tcp_user_timeout"
TIMEOUT = 60.0
"""The default of the option, in seconds."""
KEEPALIVES = 3
CONNECT_WITHIN = 10
"""The longest timeout of a connection attempt, in seconds."""


def options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for libpq by which the operating system detects a peer that acknowledges nothing."""
    timeout = _timeout(parameters)
    seconds = TIMEOUT if timeout is None else timeout
    return {
        OPTION: int(seconds * 1000),
        # The shortest timeout that libpq uses is 2 seconds.
        "connect_timeout": max(2, min(CONNECT_WITHIN, round(seconds / 6))),
        "keepalives_idle": max(1, round(seconds / 2)),
        "keepalives_interval": max(1, round(seconds / 6)),
        "keepalives_count": KEEPALIVES,
    }


def deadlines(conninfo: str) -> Deadlines | None:
    """Return the deadlines of a connection; None if the option is ``0``, so that a server may be silent for ever."""
    timeout = _timeout(conninfo_to_dict(conninfo))
    return None if timeout is None else Deadlines(timeout)


def for_libpq(conninfo: str) -> str:
    """Return ``conninfo`` without the option, which must not reach the kernel.

    The kernel would also end a connection to a healthy peer that accepts no bytes for this time. A server does so while a
    table is locked, and a client that reads slowly does so, too.
    """
    parameters = conninfo_to_dict(conninfo)
    parameters.pop(OPTION, None)
    return make_conninfo("", **parameters)


def _timeout(parameters: Mapping[str, Any]) -> float | None:
    text = parameters.get(OPTION)
    try:
        milliseconds = TIMEOUT * 1000 if text is None else int(text)
    except ValueError:
        raise InvalidArgument(
            f"{OPTION} is {text!r}: write a whole number of milliseconds, 0 for none"
        ) from None
    return milliseconds / 1000 if milliseconds > 0 else None
