"""The schemas that can be installed on a server."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.admin.versions import SYSTEMS, System
from airflow_pgchange.feeds.extensions import EXTENSIONS, is_missing
from airflow_pgchange.feeds.queries import ask


def possible(connection: psycopg.Connection[Any]) -> list[System]:
    """Return all systems that the server can have. Message queues need the extension hstore."""
    wanted = {system: EXTENSIONS.get(system.schema) for system in SYSTEMS}
    return [
        system
        for system, extension in wanted.items()
        if extension is None or not ask(connection, is_missing(extension))
    ]
