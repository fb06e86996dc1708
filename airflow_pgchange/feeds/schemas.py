"""Our schemas, which errors of PostgreSQL name. Each is registered in the module of its feed or its tables."""

from __future__ import annotations

import re

from airflow_pgchange.feeds.extensions import EXTENSIONS

SCHEMAS: set[str] = set()
NAMED = re.compile(r'\b(\w+)"?[." ]')


def our_schema(name: str, *, extension: str | None = None) -> None:
    """Register a schema, with the extension that it needs."""
    SCHEMAS.add(name)
    if extension is not None:
        EXTENSIONS[name] = extension


def schema_in(message: str) -> str | None:
    """Return the first of our schemas in a message of PostgreSQL."""
    return next((name for name in NAMED.findall(message) if name in SCHEMAS), None)


our_schema("pgchange")
