"""The tables that touch a tube, and their copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, PermissionDenied
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.tables import NAME, named, quoted, table_identifier

_RIGHTS = """
    select current_user::text, array(
        select distinct r.rolname::text from pg_catalog.pg_roles as r
        where r.oid in (c.relowner, n.nspowner) and not r.rolsuper
          and r.rolname not in (current_user, 'pg_database_owner')
    ), coalesce((
        select pg_catalog.bool_and(pg_catalog.has_table_privilege(r.oid, c.oid, needed.name))
        from pg_catalog.pg_roles as r
        cross join pg_catalog.unnest('{{select,insert,update,delete}}'::text[]) as needed(name)
        where r.rolname = {keeper}
    ), false)
    from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
    where c.oid = pg_catalog.to_regclass({copy})
"""


@dataclass(frozen=True)
class Attached:
    """A table that touches a tube.

    ``shared``: a copy that is called like the table is one of several tables' rows, for another of this name touches the
    tube too, or did under another shard: such a copy has a column ``shard``, and its key is (shard, id). ``twin`` is the
    other table with this name and this shard, whose rows no copy could tell apart. ``keeper`` owns the tube's pods.
    """

    tube: str
    shard: int
    schema: str
    name: str
    id_column: str
    predicate: str | None = None
    shared: bool = False
    twin: str | None = None
    keeper: str | None = None

    @classmethod
    def all(cls, tube: str, rows: Iterable[Mapping[str, Any]]) -> list[Attached]:
        """What ``TubeFeed.attached`` tells."""
        return [cls(tube, **row) for row in rows]

    @property
    def parts(self) -> tuple[str, str]:
        return self.schema, self.name

    @property
    def table(self) -> str:
        """As ``schema.table``, in quotes where that is needed."""
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def copy(self, template: str) -> str:
        """The name of its copy; raises InvalidArgument where its twin's rows would be in it."""
        if self.twin is not None and "{table}" in template:
            raise InvalidArgument(
                f"{self.table} and {self.twin} both touch tube {self.tube} under shard {self.shard}, so a copy could not "
                "tell their rows apart: attach one of them under another shard, or to another tube"
            )
        return named(template, self.tube, self.name)

    def copy_in(self, results: psycopg.Connection[Any], template: str) -> str:
        """The same, of a copy to be written. Who makes a tube chooses the schema where that is filled in: so that names
        only what the tube's keeper may write too, and what runs no code but of ``results``'s role or a superuser.

        Raises PermissionDenied for any other. Of a schema that the DAG's author wrote, as in ``copies.{table}``, nothing
        is asked: it is there for copies.
        """
        copy = self.copy(template)
        schema = NAME.fullmatch(template)
        if schema is not None and schema[1] and "{" not in schema[1]:
            return copy
        name = table_identifier(copy).as_string(None)
        instead = "or write its schema in the DAG, without {tube}"
        for role, strangers, may_write in rows(
            results, sql.SQL(_RIGHTS).format(keeper=self.keeper or "", copy=name)
        ):
            if not may_write:
                raise PermissionDenied(
                    f"{self.keeper}, who keeps tube {self.tube}, may not write {copy}, so it is taken for no copy: if it "
                    f'is one, grant select, insert, update, delete on {name} to "{self.keeper}"; {instead}'
                )
            if strangers:
                raise PermissionDenied(
                    f"{copy} or its schema belongs to {', '.join(strangers)}, whose triggers would run with the rights "
                    f"of {role}: let {role} or a superuser own both; {instead}"
                )
        return copy
