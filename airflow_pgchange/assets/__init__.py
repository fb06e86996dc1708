"""Assets that are feeds, and assets of the tables that batches write."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.assets.pgchange import feed_asset
    from airflow_pgchange.assets.sagas import saga_schedule
    from airflow_pgchange.assets.targets import target_tables
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "pgchange": ["feed_asset"],
            "sagas": ["saga_schedule"],
            "targets": ["target_tables"],
        },
    )

__all__ = [
    "feed_asset",
    "saga_schedule",
    "target_tables",
]
