"""Administration of a database with feeds: install, inspect, repair, maintain. Needs psycopg only, no Airflow."""

from typing import TYPE_CHECKING

from airflow_pgchange._lazy import lazily

if TYPE_CHECKING:
    from airflow_pgchange.admin.consumers import status
    from airflow_pgchange.admin.dead_letters import (
        ErasedLetter,
        Letter,
        drop_letters,
        erase_letters,
        letter_content,
        letters,
        redrive,
    )
    from airflow_pgchange.admin.health import Finding, findings
    from airflow_pgchange.admin.maintenance import Report, maintain, trim
    from airflow_pgchange.admin.maintenance_loop import maintain_every
    from airflow_pgchange.admin.manual_operations import (
        drop_consumer,
        move_consumer,
        register_consumer,
        repair_consumer,
        skip_batch,
        trim_commit_queue,
    )
    from airflow_pgchange.admin.schema import install, uninstall
    from airflow_pgchange.admin.upgrades import upgrade
    from airflow_pgchange.admin.versions import Installed
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "manual_operations": [
                "drop_consumer",
                "move_consumer",
                "register_consumer",
                "repair_consumer",
                "skip_batch",
                "trim_commit_queue",
            ],
            "consumers": ["status"],
            "dead_letters": [
                "ErasedLetter",
                "Letter",
                "drop_letters",
                "erase_letters",
                "letter_content",
                "letters",
                "redrive",
            ],
            "health": ["Finding", "findings"],
            "maintenance": ["Report", "maintain", "trim"],
            "maintenance_loop": ["maintain_every"],
            "schema": ["install", "uninstall"],
            "upgrades": ["upgrade"],
            "versions": ["Installed"],
        },
    )

__all__ = [
    "ErasedLetter",
    "Finding",
    "Installed",
    "Letter",
    "Report",
    "drop_consumer",
    "drop_letters",
    "erase_letters",
    "findings",
    "install",
    "letter_content",
    "letters",
    "maintain",
    "maintain_every",
    "move_consumer",
    "redrive",
    "register_consumer",
    "repair_consumer",
    "skip_batch",
    "status",
    "trim",
    "trim_commit_queue",
    "uninstall",
    "upgrade",
]
