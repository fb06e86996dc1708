"""The servers that a connection string names, one by one: of several libpq bounds none when it is not to block."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from typing import Any

from psycopg import pq
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import InvalidArgument

PLACE = ("host", "hostaddr", "port")


def servers(given: Mapping[str, Any]) -> list[str]:
    """A connection string for each address of each host that ``given``, or the environment, names, in the order in which
    they are to be tried. Raises InvalidArgument where hosts and ports do not fit together."""
    known = {one.keyword.decode(): one.val.decode() for one in pq.Conninfo.get_defaults() if one.val}
    lists = {name: str(given.get(name) or known.get(name, "")).split(",") for name in PLACE}
    if given.get("service") or lists["host"] == lists["hostaddr"] == [""]:
        return [make_conninfo("", **given)]  # What a service says, or the local one: libpq knows.
    count = max(len(lists["host"]), len(lists["hostaddr"]))
    if len(lists["port"]) == 1:
        lists["port"] *= count
    if any(len(found) != count and found != [""] for found in lists.values()):
        raise InvalidArgument(
            "host, hostaddr and port must name equally many servers, or one port for all: correct the connection string"
        )
    places = []
    for number in range(count):
        places += _addresses({name: found[number] for name, found in lists.items() if any(found)})
    if (given.get("load_balance_hosts") or known.get("load_balance_hosts")) == "random":
        random.shuffle(places)
    others = {name: value for name, value in given.items() if name not in PLACE}
    return [make_conninfo("", **{**others, **place}) for place in places]


def _addresses(place: Mapping[str, str]) -> list[dict[str, str]]:
    """A server once for each address of its name; as it is where it has none, so that libpq says so."""
    host = place.get("host", "")
    if not host or host.startswith(("/", "@")) or place.get("hostaddr"):
        return [dict(place)]
    try:
        found = socket.getaddrinfo(host, place.get("port"), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [dict(place)]
    return [{**place, "hostaddr": address} for address in dict.fromkeys(str(one[4][0]) for one in found)]
