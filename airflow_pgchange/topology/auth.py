"""Who may connect to the relay: SCRAM-SHA-256 verifiers as PostgreSQL keeps them, and the exchange that proves one."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import shlex
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scramp import ScramException, ScramMechanism

from airflow_pgchange.feeds.errors import ClientRefused, InvalidArgument

PLAIN, BOUND = "SCRAM-SHA-256", "SCRAM-SHA-256-PLUS"
BASE64 = r"([A-Za-z0-9+/]+={0,2})"
VERIFIER = re.compile(rf"SCRAM-SHA-256\$(\d+):{BASE64}\${BASE64}:{BASE64}")


@dataclass(frozen=True)
class Verifier:
    """What proves a password without being one."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


@dataclass(frozen=True)
class Users:
    """The users that are known, by name. Nobody learns whether a name is: a stranger's password is wrong."""

    verifiers: Mapping[str, Verifier]
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def verifier(self, user: str) -> Verifier:
        found = self.verifiers.get(user)
        if found is not None:
            return found
        salt = hmac.digest(self._secret, user.encode(), hashlib.sha256)[:16]
        return Verifier(salt, secrets.token_bytes(32), secrets.token_bytes(32), 4096)


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
    """One client's proof. ``certificate`` is the server's own, in PEM, where the connection is encrypted."""

    def __init__(self, users: Users, user: str, certificate: str | None) -> None:
        self._verifier = users.verifier(user)
        self._user = user
        self._binding = None if certificate is None else ("tls-server-end-point", certificate)
        self.mechanisms = (PLAIN,) if certificate is None else (BOUND, PLAIN)

    def first(self, mechanism: str, message: str) -> str:
        """The answer to the client's first message. Raises ClientRefused."""
        if mechanism not in self.mechanisms:
            raise ClientRefused("28000", f"{mechanism!r} was not offered: use {self.mechanisms[0]}")
        known = self._verifier
        try:
            self._server = ScramMechanism(mechanism).make_server(
                lambda _: (known.salt, known.stored_key, known.server_key, known.iterations),
                channel_binding=self._binding,
            )
            self._server.set_client_first(message)
            return str(self._server.get_server_first())
        except ScramException as error:
            raise self._failed() from error

    def final(self, message: str) -> str:
        """The answer to the client's proof. Raises ClientRefused where it proves nothing."""
        try:
            self._server.set_client_final(message)
            return str(self._server.get_server_final())
        except ScramException as error:
            raise self._failed() from error

    def _failed(self) -> ClientRefused:
        return ClientRefused("28P01", f'password authentication failed for user "{self._user}"')
