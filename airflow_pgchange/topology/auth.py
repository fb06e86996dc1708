"""The relay's password authentication: SCRAM-SHA-256 with verifiers in PostgreSQL's format.

We do not use a SCRAM library: PostgreSQL's clients send an empty user name inside SCRAM, and server libraries refuse it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import shlex
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from airflow_pgchange.errors import ClientRefused, InvalidArgument

PLAIN, BOUND = "SCRAM-SHA-256", "SCRAM-SHA-256-PLUS"
SALT = r"((?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}[A-Za-z0-9+/=]=|[A-Za-z0-9+/]{4}))"
KEY = r"([A-Za-z0-9+/]{43}=)"
VERIFIER = re.compile(rf"SCRAM-SHA-256\$(\d+):{SALT}\${KEY}:{KEY}")

NONCE = r"[!-+\--~]+"
FIRST = re.compile(rf"((n|y|p=[A-Za-z0-9.-]+),,)(n=[^,]*,r=({NONCE})(?:,.*)?)")
FINAL = re.compile(rf"(c=([A-Za-z0-9+/=]+),r=({NONCE})(?:,.*)?),p={KEY}")
NOT_PROVED = "28P01"
BINDINGS = ("p=tls-server-end-point",)
NO_BINDINGS = ("n", "y")


@dataclass(frozen=True)
class Verifier:
    """The data that checks a password without containing it (RFC 5802)."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


class Users:
    """The users of the relay, by name. Authentication never reveals whether a user exists.

    An unknown user goes through the same exchange and fails at the password. Its salt is derived from its name and from
    ``secret``, as in PostgreSQL. The catalogue stores the secret: all relays of one catalogue send the same salt for a
    name, also after a restart.
    """

    def __init__(self, verifiers: Mapping[str, Verifier]) -> None:
        self.secret: bytes | None = None
        self._verifiers = verifiers
        kinds = Counter((len(verifier.salt), verifier.iterations) for verifier in verifiers.values())
        self._kinds = sorted(kinds)
        self._shares = list(accumulate(kinds[kind] for kind in self._kinds))

    @property
    def is_ready(self) -> bool:
        """Whether the catalogue's secret is loaded, which authentication needs."""
        return self.secret is not None

    def verifier(self, user: str) -> Verifier:
        if self.secret is None:
            raise RuntimeError("authentication began before the catalogue's secret was loaded")
        # Computed for existing users too, so that the response time does not reveal whether a user exists.
        mock = self._mock(self.secret, user)
        return self._verifiers.get(user, mock)

    def _mock(self, secret: bytes, user: str) -> Verifier:
        """Return a verifier that no password matches.

        Its salt length and iteration count are drawn from those of the existing users, with the same frequencies.
        """
        drawn = int.from_bytes(hmac.digest(secret, b"kind " + user.encode(), "sha256")[:8])
        length, iterations = self._kinds[bisect_right(self._shares, drawn * self._shares[-1] >> 64)]
        salt = hashlib.shake_256(secret + user.encode()).digest(length)
        return Verifier(salt, secrets.token_bytes(32), secrets.token_bytes(32), iterations)


def read_users(path: Path) -> Users:
    """Read a file of users: one line each with the name and PostgreSQL's verifier, quoted or not; # begins a comment.

    Raises InvalidArgument if the file cannot be read, names no user, or has a malformed line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the file of users cannot be read: {error}") from error
    verifiers = {}
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InvalidArgument(f"{path}, line {number}: {error}") from None
        if not words:
            continue
        if len(words) != 2 or (match := VERIFIER.fullmatch(words[1])) is None:
            raise InvalidArgument(
                f"{path}, line {number}: write a name and its SCRAM-SHA-256 verifier, as "
                "`select rolname, rolpassword from pg_authid` shows them"
            )
        salt, stored_key, server_key = (b64decode(part) for part in match.groups()[1:])
        verifiers[words[0]] = Verifier(salt, stored_key, server_key, int(match[1]))
    if not verifiers:
        raise InvalidArgument(f"{path} names no user: nobody could connect")
    return Users(verifiers)


class Exchange:
    """The server's side of one client's SCRAM exchange (RFC 5802).

    ``binding`` is the channel binding data of the server's certificate; None on an unencrypted connection. If the client
    saw another certificate, the proof fails: this detects a man in the middle.
    """

    def __init__(self, users: Users, user: str, binding: bytes | None) -> None:
        self._verifier = users.verifier(user)
        self._user = user
        self._binding = binding
        self.mechanisms = (PLAIN,) if binding is None else (BOUND, PLAIN)

    def first(self, mechanism: str, message: str) -> str:
        """Return the answer to the client's first message. Raises ClientRefused if it is malformed or not allowed."""
        if mechanism not in self.mechanisms:
            raise ClientRefused("28000", f"{mechanism!r} was not offered: use {self.mechanisms[0]}")
        match = FIRST.fullmatch(message)
        if match is None:
            raise ClientRefused("08P01", "a malformed first message of SCRAM")
        header, flag, self._bare, nonce = match.groups()
        if flag not in (BINDINGS if mechanism == BOUND else NO_BINDINGS):
            raise ClientRefused("28000", f"{mechanism} cannot be used with the channel binding {flag!r}")
        if flag == "y" and self._binding is not None:
            raise ClientRefused(
                "28000",
                "the client was not offered channel binding: a man in the middle may have removed the offer",
            )
        self._bound = header.encode() + ((self._binding or b"") if mechanism == BOUND else b"")
        self._nonce = nonce + secrets.token_urlsafe(18)
        salt = b64encode(self._verifier.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        return self._server_first

    def final(self, message: str) -> str:
        """Check the client's proof and return the server's signature. Raises ClientRefused if the proof is wrong."""
        match = FINAL.fullmatch(message)
        if match is None:
            raise ClientRefused("08P01", "a malformed last message of SCRAM")
        without_proof, bound, nonce, proof = match.groups()
        signed = f"{self._bare},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(self._verifier.stored_key, signed, "sha256")
        key = bytes(a ^ b for a, b in zip(b64decode(proof), signature, strict=True))
        proved = hmac.compare_digest(hashlib.sha256(key).digest(), self._verifier.stored_key)
        # One condition and one error, so that the client cannot tell which check failed.
        if not (proved and nonce == self._nonce and bound == b64encode(self._bound).decode()):
            raise ClientRefused(NOT_PROVED, f'password authentication failed for user "{self._user}"')
        return "v=" + b64encode(hmac.digest(self._verifier.server_key, signed, "sha256")).decode()
