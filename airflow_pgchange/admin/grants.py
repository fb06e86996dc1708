"""The grants of our schemas that roles have, so that an upgrade can give them anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.admin.versions import SEALED, STAGING, SYSTEMS
from airflow_pgchange.feeds.queries import ask, rows

Grant = tuple[str, str, str]
"""The schema and the name of a function such as ``pubsub.grant_consumer``, and the role that it was called for."""

SCHEMAS = [name for system in SYSTEMS for name in (system.schema, system.schema + SEALED)] + [STAGING]

POSSIBLE = """
    select n.nspname::text, p.proname::text, r.rolname::text
    from pg_catalog.pg_namespace as n
    join pg_catalog.pg_proc as p on p.pronamespace = n.oid
    join pg_catalog.pg_roles as r
      on r.oid in (select a.grantee from pg_catalog.aclexplode(n.nspacl) as a where a.grantee <> n.nspowner)
    where n.nspname = any (%s) and p.proname ~ '^grant_' and pg_catalog.pg_get_function_arguments(p.oid) = 'role regrole'
    order by 1, 2, 3
"""
"""Functions that grant, with each role that may use their schema."""

RIGHTS = """
    select pg_catalog.md5(pg_catalog.string_agg(o.acl::text, ' ' order by o.class, o.oid, o.part))
    from (
        select 1, n.oid, 0, n.nspacl from pg_catalog.pg_namespace as n where n.oid = any (%(schemas)s)
        union all
        select 2, p.oid, 0, p.proacl from pg_catalog.pg_proc as p where p.pronamespace = any (%(schemas)s)
        union all
        select 3, c.oid, 0, c.relacl from pg_catalog.pg_class as c where c.relnamespace = any (%(schemas)s)
        union all
        select 4, c.oid, a.attnum, a.attacl
        from pg_catalog.pg_attribute as a join pg_catalog.pg_class as c on c.oid = a.attrelid
        where c.relnamespace = any (%(schemas)s) and a.attacl is not null
        union all
        select 5, t.oid, 0, t.typacl from pg_catalog.pg_type as t where t.typnamespace = any (%(schemas)s)
    ) as o(class, oid, part, acl)
"""
"""A hash of all rights in some schemas."""


def granted(connection: psycopg.Connection[Any]) -> list[Grant]:
    """Return the grants that roles have. A role has a grant if granting it once more changes no right."""
    schemas = [
        oid
        for (oid,) in rows(
            connection, "select oid from pg_catalog.pg_namespace where nspname = any (%s)", [SCHEMAS]
        )
    ]
    before = ask(connection, RIGHTS, {"schemas": schemas})
    found = []
    for grant in rows(connection, POSSIBLE, [SCHEMAS]):
        with connection.transaction(force_rollback=True):
            _grant(connection, *grant)
            if ask(connection, RIGHTS, {"schemas": schemas}) == before:
                found.append(grant)
    return found


def grant_again(connection: psycopg.Connection[Any], grants: Sequence[Grant]) -> None:
    """Give roles their grants anew, after an upgrade that may have created functions for them."""
    for schema, name, role in grants:
        if ask(
            connection, "select pg_catalog.to_regprocedure(%s) is not null", [f"{schema}.{name}(regrole)"]
        ):
            _grant(connection, schema, name, role)


def _grant(connection: psycopg.Connection[Any], schema: str, name: str, role: str) -> None:
    # The text of a regrole is an identifier, so a name such as "Ann" is quoted.
    query = sql.SQL("select {}(pg_catalog.quote_ident({})::pg_catalog.regrole)")
    connection.execute(query.format(sql.Identifier(schema, name), sql.Literal(role)))
