"""The tables that are attached to a tube, and the names of their copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, PermissionDenied
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.table_names import NAME, named, quoted, table_identifier

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
    """A table that is attached to a tube.

    ``key`` is the columns of the ids by which the table touches the tube. ``keeper`` is the owner of the tube's pods.

    ``shared``: a copy with the table's name holds the rows of several tables. The reason is another table of this name,
    which is attached too, or was under another shard. Such a copy has a column ``shard``, and its key is the shard and
    ``key``. ``twin`` is another table with the same name and shard. A copy could not tell their rows apart.
    """

    tube: str
    shard: int
    schema: str
    name: str
    key: tuple[str, ...]
    predicate: str | None = None
    shared: bool = False
    twin: str | None = None
    keeper: str | None = None

    @classmethod
    def all(cls, tube: str, rows: Iterable[Mapping[str, Any]]) -> list[Attached]:
        """Return the tables in the result of the query ``TubeFeed.attached``."""
        return [cls(tube, **{**row, "key": tuple(row["key"])}) for row in rows]

    @property
    def parts(self) -> tuple[str, str]:
        return self.schema, self.name

    @property
    def table(self) -> str:
        """The table as ``schema.table``, quoted where needed."""
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def copy(self, template: str) -> str:
        """Return the name of the copy. Raises InvalidArgument if the copy would also hold the rows of the twin."""
        if self.twin is not None and "{table}" in template:
            raise InvalidArgument(
                f"{self.table} and {self.twin} both touch tube {self.tube} under shard {self.shard}, so a copy could "
                f"not tell their rows apart. Attach one of them under another shard, or to another tube"
            )
        return named(template, self.tube, self.name)

    def copy_in(self, results: psycopg.Connection[Any], template: str) -> str:
        """Return the name of the copy, checked for writing.

        With ``{tube}`` as the schema, the maker of the tube chooses which table is written. So the tube's keeper must
        have the right to write that table. The table must belong to the role of ``results`` or to a superuser, because
        triggers of another owner would run with this role's rights. Raises PermissionDenied otherwise. A schema that
        the DAG's author wrote, as in ``copies.{table}``, is not checked.
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
                    f"{copy} is not written, because {self.keeper}, the owner of tube {self.tube}, may not write it. Run "
                    f'`grant select, insert, update, delete on {name} to "{self.keeper}"`, {instead}'
                )
            if strangers:
                raise PermissionDenied(
                    f"{copy} or its schema belongs to {', '.join(strangers)}, whose triggers would run with the rights "
                    f"of {role}: let {role} or a superuser own both, {instead}"
                )
        return copy
