"""The schemas that a server can have."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.admin.versions import SYSTEMS, System
from airflow_pgchange.feeds.extensions import EXTENSIONS, is_missing
from airflow_pgchange.feeds.queries import ask


def possible(connection: psycopg.Connection[Any]) -> list[System]:
    """All systems except those whose extension the server lacks: without hstore there are no queues."""
    wanted = {system: EXTENSIONS.get(system.schema) for system in SYSTEMS}
    return [
        system
        for system, extension in wanted.items()
        if extension is None or not ask(connection, is_missing(extension))
    ]
