"""The description of this provider for Airflow."""

from __future__ import annotations

from typing import Any

NAME = "PostgreSQL changes"
GUIDES = (
    "tutorial/your_own_table",
    "tutorial/demo",
    "how-to/install",
    "how-to/copy",
    "how-to/report",
    "how-to/call",
    "how-to/work-queue",
    "how-to/to-iceberg",
    "how-to/restore",
    "how-to/upgrade",
    "how-to/pgbouncer",
    "how-to/saga",
    "how-to/retention",
    "how-to/backfill",
    "how-to/workers",
    "how-to/new-consumer",
    "how-to/totals",
    "how-to/commit-queue",
    "how-to/tubes",
    "how-to/events",
    "how-to/queues",
    "how-to/topology",
    "how-to/airflow",
    "how-to/detached",
    "how-to/spark",
    "how-to/lake",
    "how-to/managed_postgresql",
    "how-to/testing",
    "how-to/deploy",
    "how-to/sizing",
    "how-to/monitoring",
    "how-to/page",
    "how-to/dead-letters",
    "how-to/uninstall",
    "concepts/batch",
    "concepts/watermark",
    "concepts/tube",
    "concepts/event-log",
    "concepts/queue",
    "concepts/saga",
    "concepts/topology",
    "concepts/lag",
    "concepts/guarantees",
    "concepts/when-not",
    "reference/roles",
    "reference/command-line",
    "reference/metrics",
    "reference/matrix",
    "reference/configuration",
    "reference/sql",
    "reference/glossary",
    "performance",
)
"""Pages below ``docs`` in the source distribution."""


def get_provider_info() -> dict[str, Any]:
    """The entry point ``apache_airflow_provider``."""
    return {
        "package-name": "airflow-provider-pgchange",
        "name": NAME,
        "description": "Pipelines that run when PostgreSQL data changes, without losing or doubling any.",
        "integrations": [
            {
                "integration-name": NAME,
                "external-doc-url": "https://pypi.org/project/airflow-provider-pgchange/",
                "logo": "/airflow_pgchange/plugins/page/icon.svg",
                "how-to-guide": [f"/docs/{guide}.md" for guide in GUIDES],
                "tags": ["software"],
            }
        ],
        "hooks": [_modules("hooks.pgchange")],
        "operators": [
            _modules(
                "operators.feed",
                "operators.claim",
                "operators.batch",
                "operators.detached",
                "operators.lease",
                "operators.spark_detached",
                "operators.spark",
                "operators.schema",
                "operators.maintenance",
                "operators.tube",
                "operators.events",
                "operators.handlers",
                "operators.lake_maintenance",
                "operators.dead_letters",
                "operators.messages",
                "operators.sagas",
            )
        ],
        "sensors": [_modules("sensors.feed", "sensors.consumer", "sensors.sagas")],
        "triggers": [_modules("triggers.feed", "triggers.spark_driver")],
        "queues": ["airflow_pgchange.queues.feed.FeedQueueProvider"],
        "asset-uris": [
            {
                "schemes": ["pgchange"],
                "handler": "airflow_pgchange.assets.pgchange.sanitize_uri",
                "factory": "airflow_pgchange.assets.pgchange.feed_asset",
                "to_openlineage_converter": "airflow_pgchange.assets.pgchange.to_openlineage",
            }
        ],
        "task-decorators": [
            {"name": "pgchange_batch", "class-name": "airflow_pgchange.decorators.batch.pgchange_batch_task"},
            {"name": "pgchange_spark", "class-name": "airflow_pgchange.decorators.spark.pgchange_spark_task"},
            {"name": "pgchange_saga", "class-name": "airflow_pgchange.decorators.sagas.pgchange_saga_task"},
            {
                "name": "pgchange_handler",
                "class-name": "airflow_pgchange.decorators.handlers.pgchange_handler_task",
            },
            {
                "name": "pgchange_collect",
                "class-name": "airflow_pgchange.decorators.tube.pgchange_collect_task",
            },
        ],
        "plugins": [{"name": "pgchange", "plugin-class": "airflow_pgchange.plugins.pgchange.PgChangePlugin"}],
        "extra-links": [
            "airflow_pgchange.operators.spark_ui.SparkUiLink",
            "airflow_pgchange.operators.page_link.ConsumerLink",
        ],
        "cli": ["airflow_pgchange.cli.commands.get_pgchange_cli_commands"],
        "config": {"pgchange": _config()},
    }


def _modules(*names: str) -> dict[str, Any]:
    return {"integration-name": NAME, "python-modules": [f"airflow_pgchange.{name}" for name in names]}


def _config() -> dict[str, Any]:
    return {
        "description": "The page, and consumers.",
        "options": {
            "connections": {
                "description": "Connections, with commas between, that the page shows besides those that DAGs name.",
                "version_added": "0.9.0",
                "type": "string",
                "example": "airline,warehouse",
                "default": "",
            },
            "register_consumers": {
                "description": "Whether a task registers a consumer that is not registered yet. If not, the task fails, "
                "and `airflow-pgchange register` registers the consumer.",
                "version_added": "0.9.0",
                "type": "boolean",
                "example": None,
                "default": "True",
            },
        },
    }
