"""A session of the relay without a network: the test passes the client's bytes in, and reads the replies."""

from __future__ import annotations

import struct

import pytest

from airflow_pgchange.errors import ClientRefused
from airflow_pgchange.topology.protocol import Send, Session, Wish

WORD = {"user": "ann", "smart_connector": "0.1"}


def packet(parameters, version=3 << 16):
    pairs = "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode()
    return request(version, pairs + b"\0")


def request(code, rest=b""):
    return struct.pack("!II", 8 + len(rest), code) + rest


def message(kind, body=b""):
    return kind + struct.pack("!I", 4 + len(body)) + body


def trusting():
    return Session(1, None)


def sent(steps):
    """Return the bytes of all replies, and the other actions that the session requests."""
    steps = list(steps)
    return b"".join(step.data for step in steps if isinstance(step, Send)), [
        step for step in steps if isinstance(step, Wish)
    ]


def kinds(data):
    """Return the kinds of the messages that were sent."""
    found = b""
    while data:
        found += data[:1]
        data = data[1 + struct.unpack("!I", data[1:5])[0] :]
    return found


def registered():
    session = trusting()
    assert sent(session.receive(packet(WORD)))[1] == [Wish.REGISTER]
    list(session.ready())
    return session


def refused(session, data):
    with pytest.raises(ClientRefused) as caught:
        list(session.receive(data))
    return caught.value
