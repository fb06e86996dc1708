"""Split a connection string into one for each server.

libpq does not apply ``connect_timeout`` to non-blocking connections, so we try the servers one by one with our own
timeout.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from typing import Any

from psycopg import pq
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument

ENDPOINT = ("host", "hostaddr", "port")


def servers(parameters: Mapping[str, Any]) -> list[str]:
    """Return a connection string for each address of each host in ``parameters`` or in the environment.

    The order is that in which to try them. Raises InvalidArgument if the numbers of hosts and ports do not match.
    """
    defaults = {each.keyword.decode(): each.val.decode() for each in pq.Conninfo.get_defaults() if each.val}
    lists = {name: str(parameters.get(name) or defaults.get(name, "")).split(",") for name in ENDPOINT}
    if parameters.get("service") or lists["host"] == lists["hostaddr"] == [""]:
        return [make_conninfo("", **parameters)]  # libpq resolves a service, and the default local server.
    count = max(len(lists["host"]), len(lists["hostaddr"]))
    if len(lists["port"]) == 1:
        lists["port"] *= count
    if any(len(values) != count and values != [""] for values in lists.values()):
        raise InvalidArgument(
            "host, hostaddr and port must name equally many servers, or one port for all: correct the connection string"
        )
    endpoints = []
    for number in range(count):
        endpoints += _addresses({name: values[number] for name, values in lists.items() if any(values)})
    if (parameters.get("load_balance_hosts") or defaults.get("load_balance_hosts")) == "random":
        random.shuffle(endpoints)
    others = {name: value for name, value in parameters.items() if name not in ENDPOINT}
    return [make_conninfo("", **{**others, **endpoint}) for endpoint in endpoints]


def _addresses(endpoint: Mapping[str, str]) -> list[dict[str, str]]:
    """Return one endpoint for each address of a host name. An unresolvable name is kept: libpq reports the error."""
    host = endpoint.get("host", "")
    if not host or host.startswith(("/", "@")) or endpoint.get("hostaddr"):
        return [dict(endpoint)]
    try:
        infos = socket.getaddrinfo(host, endpoint.get("port"), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [dict(endpoint)]
    return [{**endpoint, "hostaddr": address} for address in dict.fromkeys(str(info[4][0]) for info in infos)]
