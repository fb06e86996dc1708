"""Results in tables of a lake: the rows of each batch are in the table exactly once.

``Iceberg`` names a table whose catalog is in the database of the results. Its new snapshot and the consumer's progress
are one commit of PostgreSQL. ``RemoteIceberg`` names a table of any other catalog. Its snapshots name the batches that
it has, so a retry finds them. ``Delta`` names a Delta table. Its log has the number and the id of each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.lake.maintenance import LakeReport, Leftover, maintain
    from airflow_pgchange.lake.tables import Delta, Iceberg, RemoteIceberg
    from airflow_pgchange.lake.writing import write
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "maintenance": ["LakeReport", "Leftover", "maintain"],
            "tables": ["Delta", "Iceberg", "RemoteIceberg"],
            "writing": ["write"],
        },
    )

__all__ = ["Delta", "Iceberg", "LakeReport", "Leftover", "RemoteIceberg", "maintain", "write"]
