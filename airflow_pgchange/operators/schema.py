"""The schemas: install and upgrade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_pgchange import schema
from airflow_pgchange.hooks.pgchange import PgChangeHook

if TYPE_CHECKING:
    from airflow.sdk import Context


class InstallSchemaOperator(BaseOperator):
    """Installs our schemas in a database, and upgrades those that are there; doing it twice does nothing.

    It moves no consumer and no change: whatever was captured or processed stays so, exactly as often as
    before.

    :param postgres_conn_id: the database, with a role that may create schemas in it
    :param systems: which of ``airflow_pgchange.schema.SYSTEMS``; default: all (templated)
    :param upgrade: bring older versions up to date; otherwise they are an error
    """

    template_fields: Sequence[str] = ("postgres_conn_id", "systems")

    def __init__(
        self,
        *,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        systems: Sequence[str] | None = None,
        upgrade: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id
        self.systems = systems
        self.upgrade = upgrade

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Returns what the database now holds: ``[{system, version, needed, intact}]``."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            if self.upgrade:
                schema.upgrade(connection)
            schema.install(connection, self.systems)
            return [asdict(found) for found in schema.installed(connection)]
