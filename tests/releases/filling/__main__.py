"""Commands for an empty database: ``install CONNINFO`` and ``populate CONNINFO``."""

from __future__ import annotations

import sys

import psycopg

from airflow_pgchange import admin

from .consumers import sessions_reused
from .contents import FEEDS, note
from .objects import create


def install(db: str) -> set[str]:
    """Install the schemas, and return those that the server supports."""
    with psycopg.connect(db, autocommit=True) as connection:
        return {state.system for state in admin.install(connection) if state.left_out is None}


def populate(db: str) -> None:
    """Install the schemas, and fill the database."""
    installed = install(db)
    with sessions_reused(), psycopg.connect(db, autocommit=True) as connection:
        create(connection, "mbus" in installed)
        for system, (_, begin_work) in FEEDS.items():
            if system in installed:
                begin_work(connection, db)
        note(connection)


if __name__ == "__main__":
    {"install": install, "populate": populate}[sys.argv[1]](sys.argv[2])
