"""Who may connect to the relay: SCRAM-SHA-256 verifiers as PostgreSQL keeps them, and the exchange that proves one.

PostgreSQL's clients send an empty name within SCRAM, which libraries for the server's side refuse.
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
    """What proves a password without being one."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


class Users:
    """The users that are known, by name. Nobody learns whether a name is known: the password of an unknown one is wrong.

    An unknown user gets a salt that is derived from its name and from ``secret``, as in PostgreSQL. The catalogue keeps
    the secret, so that all relays of one catalogue give a name the same salt, also after a restart.
    """

    def __init__(self, verifiers: Mapping[str, Verifier]) -> None:
        self.secret: bytes | None = None
        self._verifiers = verifiers
        kinds = Counter((len(known.salt), known.iterations) for known in verifiers.values())
        self._kinds = sorted(kinds)
        self._shares = list(accumulate(kinds[kind] for kind in self._kinds))

    @property
    def is_ready(self) -> bool:
        """Whether the secret is known, so that users can be asked for their passwords."""
        return self.secret is not None

    def verifier(self, user: str) -> Verifier:
        if self.secret is None:
            raise RuntimeError("users are asked for passwords before the catalogue has told its secret")
        # Made for known users, too: both take the same time.
        mock = self._mock(self.secret, user)
        return self._verifiers.get(user, mock)

    def _mock(self, secret: bytes, user: str) -> Verifier:
        """A verifier that no password fits. It has the length of salt and the iterations of a known user: each pair is as
        frequent as among known users."""
        drawn = int.from_bytes(hmac.digest(secret, b"kind " + user.encode(), "sha256")[:8])
        length, iterations = self._kinds[bisect_right(self._shares, drawn * self._shares[-1] >> 64)]
        salt = hashlib.shake_256(secret + user.encode()).digest(length)
        return Verifier(salt, secrets.token_bytes(32), secrets.token_bytes(32), iterations)


def read_users(path: Path) -> Users:
    """The users of a file: a line each, the name and PostgreSQL's verifier, quoted or not; # begins a comment.

    Raises InvalidArgument for a file that cannot be read, or a line that is none of this.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the file of users cannot be read: {error}") from error
    found = {}
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
        found[words[0]] = Verifier(salt, stored_key, server_key, int(match[1]))
    if not found:
        raise InvalidArgument(f"{path} names no user: nobody could connect")
    return Users(found)


class Exchange:
    """One client's proof, as RFC 5802 has it. ``binding`` stands for the server's certificate where the connection is
    encrypted: a client that has seen another one has somebody between us."""

    def __init__(self, users: Users, user: str, binding: bytes | None) -> None:
        self._verifier = users.verifier(user)
        self._user = user
        self._binding = binding
        self.mechanisms = (PLAIN,) if binding is None else (BOUND, PLAIN)

    def first(self, mechanism: str, message: str) -> str:
        """The answer to the client's first message. Raises ClientRefused."""
        if mechanism not in self.mechanisms:
            raise ClientRefused("28000", f"{mechanism!r} was not offered: use {self.mechanisms[0]}")
        found = FIRST.fullmatch(message)
        if found is None:
            raise ClientRefused("08P01", "a malformed first message of SCRAM")
        header, flag, self._bare, nonce = found.groups()
        if flag not in (BINDINGS if mechanism == BOUND else NO_BINDINGS):
            raise ClientRefused("28000", f"{mechanism} cannot be used with the channel binding {flag!r}")
        if flag == "y" and self._binding is not None:
            raise ClientRefused(
                "28000", "somebody has hidden from the client that channels can be bound here"
            )
        self._bound = header.encode() + ((self._binding or b"") if mechanism == BOUND else b"")
        self._nonce = nonce + secrets.token_urlsafe(18)
        known = self._verifier
        self._told = f"r={self._nonce},s={b64encode(known.salt).decode()},i={known.iterations}"
        return self._told

    def final(self, message: str) -> str:
        """The answer to the client's proof. Raises ClientRefused where it proves nothing."""
        found = FINAL.fullmatch(message)
        if found is None:
            raise ClientRefused("08P01", "a malformed last message of SCRAM")
        said, bound, nonce, proof = found.groups()
        signed = f"{self._bare},{self._told},{said}".encode()
        signature = hmac.digest(self._verifier.stored_key, signed, "sha256")
        key = bytes(a ^ b for a, b in zip(b64decode(proof), signature, strict=True))
        proved = hmac.compare_digest(hashlib.sha256(key).digest(), self._verifier.stored_key)
        # In one: nobody learns which of them was wrong.
        if not (proved and nonce == self._nonce and bound == b64encode(self._bound).decode()):
            raise ClientRefused(NOT_PROVED, f'password authentication failed for user "{self._user}"')
        return "v=" + b64encode(hmac.digest(self._verifier.server_key, signed, "sha256")).decode()
