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

PLACE = ("host", "hostaddr", "port")


def servers(parameters: Mapping[str, Any]) -> list[str]:
    """Return a connection string for each address of each host in ``parameters`` or in the environment.

    The order is that in which to try them. Raises InvalidArgument if the numbers of hosts and ports do not match.
    """
    defaults = {each.keyword.decode(): each.val.decode() for each in pq.Conninfo.get_defaults() if each.val}
    lists = {name: str(parameters.get(name) or defaults.get(name, "")).split(",") for name in PLACE}
    if parameters.get("service") or lists["host"] == lists["hostaddr"] == [""]:
        return [make_conninfo("", **parameters)]  # libpq resolves a service, and the default local server.
    count = max(len(lists["host"]), len(lists["hostaddr"]))
    if len(lists["port"]) == 1:
        lists["port"] *= count
    if any(len(values) != count and values != [""] for values in lists.values()):
        raise InvalidArgument(
            "host, hostaddr and port must name equally many servers, or one port for all: correct the connection string"
        )
    places = []
    for number in range(count):
        places += _addresses({name: values[number] for name, values in lists.items() if any(values)})
    if (parameters.get("load_balance_hosts") or defaults.get("load_balance_hosts")) == "random":
        random.shuffle(places)
    others = {name: value for name, value in parameters.items() if name not in PLACE}
    return [make_conninfo("", **{**others, **place}) for place in places]


def _addresses(place: Mapping[str, str]) -> list[dict[str, str]]:
    """Return one place for each address of a host name. An unresolvable name is kept, so that libpq reports the error."""
    host = place.get("host", "")
    if not host or host.startswith(("/", "@")) or place.get("hostaddr"):
        return [dict(place)]
    try:
        infos = socket.getaddrinfo(host, place.get("port"), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [dict(place)]
    return [{**place, "hostaddr": address} for address in dict.fromkeys(str(info[4][0]) for info in infos)]
