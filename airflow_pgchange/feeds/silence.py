"""How long a server may give no sign of life: the connection option ``tcp_user_timeout``, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.line import Deadlines

OPTION = "tcp_user_timeout"
TIMEOUT = 60.0
"""Seconds, where the connection string says nothing else."""
KEEPALIVES = 3
CONNECT_WITHIN = 10
"""Seconds."""


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for libpq by which the system notices a peer that acknowledges nothing."""
    timeout = _timeout(given)
    known = TIMEOUT if timeout is None else timeout
    return {
        OPTION: int(known * 1000),
        # libpq waits for no less than 2 seconds.
        "connect_timeout": max(2, min(CONNECT_WITHIN, round(known / 6))),
        "keepalives_idle": max(1, round(known / 2)),
        "keepalives_interval": max(1, round(known / 6)),
        "keepalives_count": KEEPALIVES,
    }


def deadlines(conninfo: str) -> Deadlines | None:
    """The deadlines of a connection; None where it says that a server may be silent for ever, as ``0`` does."""
    timeout = _timeout(conninfo_to_dict(conninfo))
    return None if timeout is None else Deadlines(timeout)


def for_libpq(conninfo: str) -> str:
    """``conninfo`` without the option. The kernel would also end a connection whose other side is there and takes no
    bytes for so long, as a server may while a table is locked, or a client that reads slowly."""
    given = conninfo_to_dict(conninfo)
    given.pop(OPTION, None)
    return make_conninfo("", **given)


def _timeout(given: Mapping[str, Any]) -> float | None:
    text = given.get(OPTION)
    try:
        milliseconds = TIMEOUT * 1000 if text is None else int(text)
    except ValueError:
        raise InvalidArgument(
            f"{OPTION} is {text!r}: write a whole number of milliseconds, 0 for none"
        ) from None
    return milliseconds / 1000 if milliseconds > 0 else None
