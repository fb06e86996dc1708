"""Write results to their tables: stage them while a batch is processed, and merge them when it commits. Needs psycopg
only."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.results.attached_tables import Attached
    from airflow_pgchange.results.merge_modes import Mode
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "attached_tables": ["Attached"],
            "merge_modes": ["Mode"],
        },
    )

__all__ = [
    "Attached",
    "Mode",
]
