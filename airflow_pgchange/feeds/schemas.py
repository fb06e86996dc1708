"""Our schemas, for the advice in errors. Each is registered in the module of its feed or its tables."""

from __future__ import annotations

import re

from airflow_pgchange.feeds.extensions import EXTENSIONS

GRANTS: dict[str, str] = {}
"""The advice about grants, by the name of the schema or function in an error of PostgreSQL."""
REVOKED = (
    "PostgreSQL lets every role call it, but that was revoked on this server: let a superuser run `grant execute on "
    "function pg_catalog.{} to <role>` for this role and for the owner of our schemas"
)
"""The advice for a function of PostgreSQL that may not be called. Some managed services revoke the right to call it."""
SCHEMAS: set[str] = set()
NAMED = re.compile(r'\b(\w+)"?[." ]')


def our_schema(name: str, *, grants: str, extension: str | None = None) -> None:
    """Register a schema, with the advice about its grants and the extension that it needs."""
    SCHEMAS.add(name)
    GRANTS[name] = grants
    if extension is not None:
        EXTENSIONS[name] = extension


def schema_in(message: str) -> str | None:
    """Return the first of our schemas in a message of PostgreSQL."""
    return next((name for name in NAMED.findall(message) if name in SCHEMAS), None)


our_schema(
    "pgchange",
    grants="`pubsub.grant_consumer('<role>')`, or the grant of another feed, is for consumers, and opens it too",
)
GRANTS |= dict.fromkeys(
    ("letters", "redrive", "drop_letters"),
    "the `grant_admin('<role>')` of the schema whose letters they are, such as `pubsub.grant_admin`, is for roles "
    "that keep dead letters",
)
