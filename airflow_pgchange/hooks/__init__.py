"""Connections to PostgreSQL by the name that Airflow keeps them under."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.hooks.pgchange import PgChangeHook
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "pgchange": ["PgChangeHook"],
        },
    )

__all__ = [
    "PgChangeHook",
]
