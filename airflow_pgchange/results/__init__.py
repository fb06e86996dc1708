"""Write results to their tables: stage them while a batch is processed, and merge them when it commits. Needs psycopg
only."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.results.attached import Attached
    from airflow_pgchange.results.modes import Mode
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "attached": ["Attached"],
            "modes": ["Mode"],
        },
    )

__all__ = [
    "Attached",
    "Mode",
]
