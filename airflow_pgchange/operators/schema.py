"""The operator that installs and upgrades the schemas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_pgchange.admin import schema, upgrades
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, checks

if TYPE_CHECKING:
    from airflow.sdk import Context


class InstallSchemaOperator(CheckedArguments, BaseOperator):
    """Installs our schemas in a database, and upgrades existing schemas. Repeating it changes nothing.

    It moves no consumer and changes no captured data, so the guarantees of the other operators hold.

    :param postgres_conn_id: the database; the role must have the right to create schemas in it
    :param systems: the systems of ``airflow_pgchange.admin.versions.SYSTEMS`` to install; systems that they need are
        installed, too. Default: all that the server supports; the log names the others (templated)
    :param without: systems not to install, such as ``["topology"]`` if PostGIS has a schema of that name (templated)
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
        """Return the state of each system, with the reason if it was left out:
        ``[{system, version, needed, intact, left_out}]``."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            upgrades.upgrade(connection)
            states = schema.install(connection, self.systems, without=self.without or ())
        for state in states:
            if state.left_out:
                self.log.warning("%s was left out: %s", state.system, state.left_out)
        return [asdict(state) for state in states]
