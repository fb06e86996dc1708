"""Tokens of a cloud's sign-in in place of passwords.

A server checks a token only when a session begins, so an open connection outlives its token. But a task keeps a
connection string for hours. So each new connection by such a string gets a token that is at most five minutes old.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

RENEW_AFTER = 300.0
"""Seconds: a third of the shortest lifetime that a cloud gives its tokens, which is 15 minutes for Amazon RDS."""

SignIn = Mapping[str, Any]
"""Options of libpq by which to sign in: the user, the token as the ``password``, and the port."""


@dataclass(frozen=True)
class _CachedSignIn:
    """The last sign-in that a cloud gave for an Airflow connection, and how to ask for another."""

    ask: Callable[[], SignIn]
    sign_in: SignIn
    asked_at: float


_lock = Lock()
_sign_ins: dict[str, _CachedSignIn] = {}
"""The last sign-in of each Airflow connection, by the key that ``sign_in`` was given."""
_names: dict[bytes, str] = {}
"""The key of the Airflow connection of each token, by the digest of the token."""


def sign_in(name: str, ask: Callable[[], SignIn]) -> SignIn:
    """Return how to sign in by an Airflow connection, with a young token. ``ask`` gets a new token from the cloud."""
    with _lock:
        last = _sign_ins.get(name)
        if last is None or time.monotonic() - last.asked_at >= RENEW_AFTER:
            asked_at = time.monotonic()
            last = _sign_ins[name] = _CachedSignIn(ask, ask(), asked_at)
            _names[_digest(last.sign_in["password"])] = name
        return last.sign_in


def renewed(conninfo: str) -> str:
    """Return a connection string with a young token, if its password is a token that ``sign_in`` has returned."""
    password = conninfo_to_dict(conninfo).get("password") if _names else None
    name = _names.get(_digest(str(password)))
    if name is None:
        return conninfo
    return make_conninfo(conninfo, password=sign_in(name, _sign_ins[name].ask)["password"])


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
