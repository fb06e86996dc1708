"""Find the tables that a transaction has written."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.queries import rows

# Insert, update, delete, merge and copy hold their lock until the end of the transaction, or until a savepoint is rolled
# back. If a partition was written by way of its table, only the table is listed.
_WRITTEN = """
with written as (
    select distinct c.oid, n.nspname, c.relname, c.relispartition
    from pg_catalog.pg_locks as l
    join pg_catalog.pg_class as c on c.oid = l.relation
    join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
    where l.pid = pg_catalog.pg_backend_pid() and l.mode = 'RowExclusiveLock' and l.granted
      and l.database = (select d.oid from pg_catalog.pg_database as d where d.datname = pg_catalog.current_database())
      and c.relkind in ('r', 'p', 'f') and c.relpersistence <> 't'
      and n.nspname !~ '^(pg_|information_schema$)' and n.nspname <> all ({}::name[])
)
select nspname, relname from written as w
where not (w.relispartition and exists (
    select from pg_catalog.pg_partition_ancestors(w.oid) as a join written as p on p.oid = a.relid where p.oid <> w.oid
))
order by nspname, relname
"""


def written(connection: psycopg.Connection[Any], without: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the schema and name of each table that the open transaction has written, even if no row was affected.

    Tables in the schemas ``without`` are left out.
    """
    return [(schema, table) for schema, table in rows(connection, sql.SQL(_WRITTEN).format(sorted(without)))]
