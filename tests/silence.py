"""Connection strings with short timeouts for servers that fall silent, and the errors of calls that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from psycopg.conninfo import make_conninfo

from tests.proxy import Proxy

TIMEOUT = 1.2
"""Seconds of silence until a server counts as dead: a fiftieth of the default."""


def impatient(conninfo: str, timeout: float = TIMEOUT) -> str:
    """Return the connection string with this short timeout."""
    return make_conninfo(conninfo, tcp_user_timeout=round(timeout * 1000))


def through(proxy: Proxy, conninfo: str, timeout: float = TIMEOUT) -> str:
    """Return the connection string with this short timeout and the address of a proxy."""
    return impatient(make_conninfo(conninfo, host="127.0.0.1", port=proxy.port), timeout)


def ended(work: Callable[[], object], within: float = 15.0) -> BaseException | None:
    """Return the exception that ``work`` raises, or None. Fail if ``work`` does not end in time."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within)
    assert raised, f"the work did not end within {within:g} s"
    return raised[0]
