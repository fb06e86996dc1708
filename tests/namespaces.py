"""A network namespace with a link to the current namespace. While the link is down, all bytes are lost without an
error."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

FORBIDDEN = re.compile("not permitted|[Pp]ermission denied|not supported|Unknown device type")
_made = itertools.count()


class Namespace:
    """A network namespace. ``here`` is the address of this machine on the link to it."""

    def __init__(self, name: str, here: str, link: str) -> None:
        self.here = here
        self._name = name
        self._link = link

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Start a program in the namespace."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def cut_off(self) -> None:
        """Drop every byte from now on."""
        _ip("link", "set", self._link, "down")


@contextmanager
def namespace() -> Iterator[Namespace]:
    """A namespace, removed at the end. Skips the test if this machine does not allow a network namespace."""
    # The kernel removes a link some time after its namespace.
    number = (os.getpid() + 1021 * next(_made)) % 16384
    name, link, network = f"pgchange{number}", f"pgc{number}", f"10.211.{number // 64}.{number % 64 * 4}"
    here, there = (f"{network.rpartition('.')[0]}.{number % 64 * 4 + last}" for last in (1, 2))
    try:
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "there", "netns", name)
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces without the program ip: {error}")
    except subprocess.CalledProcessError as error:
        _remove(name)
        if not FORBIDDEN.search(error.stderr):
            raise
        pytest.skip(f"this machine does not allow to make network namespaces: {error.stderr.strip()}")
    try:
        _ip("address", "add", f"{here}/30", "dev", link)
        _ip("link", "set", link, "up")
        _ip("-n", name, "address", "add", f"{there}/30", "dev", "there")
        _ip("-n", name, "link", "set", "there", "up")
        yield Namespace(name, here, link)
    finally:
        _remove(name)


def _remove(name: str) -> None:
    """Remove the namespace, and its link with it."""
    with suppress(OSError, subprocess.CalledProcessError):
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
