"""What Airflow wants to know about this provider."""

from __future__ import annotations

from typing import Any

NAME = "PostgreSQL changes"


def get_provider_info() -> dict[str, Any]:
    """The entry point ``apache_airflow_provider``."""
    return {
        "package-name": "airflow-provider-pgchange",
        "name": NAME,
        "description": "Pipelines that run when PostgreSQL data changes, without losing or doubling any.",
        "integrations": [{"integration-name": NAME, "tags": ["software"]}],
        "hooks": [_modules("hooks.pgchange")],
        "operators": [
            _modules(
                "operators.batch",
                "operators.spark",
                "operators.schema",
                "operators.maintenance",
                "operators.tube",
                "operators.events",
                "operators.handlers",
                "operators.letters",
                "operators.queues",
                "operators.sagas",
            )
        ],
        "sensors": [_modules("sensors.pgchange", "sensors.topology", "sensors.sagas")],
        "triggers": [_modules("triggers.feed")],
        "connection-types": [_connection_type()],
        "asset-uris": [
            {
                "schemes": ["pgchange"],
                "handler": "airflow_pgchange.assets.pgchange.sanitize_uri",
                "factory": "airflow_pgchange.assets.pgchange.feed_asset",
            }
        ],
        "task-decorators": [
            {"name": "pgchange_batch", "class-name": "airflow_pgchange.decorators.batch.pgchange_batch_task"}
        ],
        "cli": ["airflow_pgchange.cli.definition.get_pgchange_cli_commands"],
        "config": {"pgchange": _config()},
    }


def _modules(*names: str) -> dict[str, Any]:
    return {"integration-name": NAME, "python-modules": [f"airflow_pgchange.{name}" for name in names]}


def _connection_type() -> dict[str, Any]:
    """A form for servers of one group; an ordinary ``postgres`` connection does as well."""
    return {
        "connection-type": "pgchange",
        "hook-class-name": "airflow_pgchange.hooks.pgchange.PgChangeHook",
        "hook-name": NAME,
        "ui-field-behaviour": {
            "hidden-fields": [],
            "relabeling": {"schema": "Database", "login": "Role", "host": "Host(s)"},
            "placeholders": {
                "host": "db1,db2 or db1:5432,db2:5433",
                "port": "5432",
                "extra": '{"sslmode": "verify-full", "sslrootcert": "/etc/ssl/certs/ca.pem"}',
            },
        },
        "conn-fields": {
            "sslmode": {
                "label": "SSL mode",
                "description": "PostgreSQL's sslmode. Empty: libpq's default (prefer)",
                "schema": {
                    "type": ["string", "null"],
                    "enum": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"],
                },
            },
            "target_session_attrs": {
                "label": "Preferred server",
                "description": "With several hosts, of a primary and its standbys: which to read from. "
                "Writes always go to the primary",
                "schema": {
                    "type": ["string", "null"],
                    "enum": ["any", "read-write", "read-only", "primary", "standby", "prefer-standby"],
                },
            },
        },
    }


def _config() -> dict[str, Any]:
    return {
        "description": "How watchers and deferred sensors wait for changes.",
        "options": {
            "first_pause": _seconds(
                "Seconds from a wake-up to the first repeat, while the consumer makes no progress. Longer "
                "than Airflow takes to start a task; each repeat doubles it.",
                "30.0",
            ),
            "longest_pause": _seconds("Seconds between two repeats, at most.", "300.0"),
        },
    }


def _seconds(description: str, default: str) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": "float",
        "example": None,
        "default": default,
    }
