"""The schemas: install and upgrade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_pgchange.admin import schema
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, checks

if TYPE_CHECKING:
    from airflow.sdk import Context


class InstallSchemaOperator(CheckedArguments, BaseOperator):
    """Installs our schemas in a database, and upgrades those that are there; doing it twice does nothing.

    It moves no consumer and no change: whatever was captured or processed stays so, exactly as often as
    before.

    :param postgres_conn_id: the database, with a role that may create schemas in it
    :param systems: which of ``airflow_pgchange.admin.versions.SYSTEMS``, with what they need; default: all that the
        server can hold, and the log says what it cannot (templated)
    :param without: which not, such as ``["topology"]`` where PostGIS has a schema of that name (templated)
    """

    arguments = checks("postgres_conn_id", "systems", "without")
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        systems: Sequence[str] | str | None = None,
        without: Sequence[str] | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id
        self.systems: Any = systems
        self.without: Any = without

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Returns what the database now holds, and what was left out and why:
        ``[{system, version, needed, intact, left_out}]``."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            schema.upgrade(connection)
            found = schema.install(connection, self.systems, without=self.without or ())
        for state in found:
            if state.left_out:
                self.log.warning("%s was left out: %s", state.system, state.left_out)
        return [asdict(state) for state in found]
