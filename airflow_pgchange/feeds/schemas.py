"""Our schemas, as errors speak of them: each is told of where its feed or its tables are."""

from __future__ import annotations

import re

from airflow_pgchange.feeds.extensions import EXTENSIONS

GRANTS: dict[str, str] = {}
"""Who needs which grant, by the name of the schema or the function that PostgreSQL has in its error."""
REVOKED = (
    "PostgreSQL lets every role call it, but that was revoked on this server: let a superuser run `grant execute on "
    "function pg_catalog.{} to <role>` for this role and for the owner of our schemas"
)
"""Advice for a function of PostgreSQL that may not be called, because some managed services revoke it."""
SCHEMAS: set[str] = set()
NAMED = re.compile(r'\b(\w+)"?[." ]')


def our_schema(name: str, *, grants: str, extension: str | None = None) -> None:
    """Tell of a schema: who needs which of its grants, and the extension that a server must have for it."""
    SCHEMAS.add(name)
    GRANTS[name] = grants
    if extension is not None:
        EXTENSIONS[name] = extension


def schema_in(message: str) -> str | None:
    """The first of our schemas that a message of PostgreSQL names."""
    return next((name for name in NAMED.findall(message) if name in SCHEMAS), None)


our_schema(
    "pgchange",
    grants="`pubsub.grant_consumer('<role>')`, or the grant of another feed, is for who consumes, and opens it too",
)
GRANTS |= dict.fromkeys(
    ("letters", "redrive", "drop_letters"),
    "the `grant_admin('<role>')` of the schema whose letters they are, such as `pubsub.grant_admin`, is for who "
    "keeps dead letters",
)
