"""Manifests of detached batches, kept in the database of the results, so that an ack on any machine can merge the
results.

The manifest of an application is the only row of a staging table. So it has the rights of staging tables and is removed
with them. A crash of the server empties it together with the results that it lists.

Workers of a queue do not exclude each other. So two acks of one attempt may run at once. The first to finish drops the
table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import BatchNotFinished, SchemaMissing, StaleClaim
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.results.merge import merge
from airflow_pgchange.results.staging import SCHEMA, Result, create, prefix, result_of

TARGET = ""
"""In place of a target, in the comment of a staging table that holds a manifest. No table has an empty name."""

# A manifest names the tables to merge, with the rights of the role that acks. So accept only manifests of roles that this
# role is a member of. A superuser is a member of every role, so it accepts only its own.
CANDIDATES = """
select c.relname, pg_catalog.obj_description(c.oid, 'pg_class')
from pg_catalog.pg_class as c, pg_catalog.pg_roles as me
where c.relnamespace = pg_catalog.to_regnamespace({schema}) and c.relkind = 'r'
  and pg_catalog.starts_with(c.relname, {prefix})
  and me.rolname = current_user
  and (c.relowner = me.oid or not me.rolsuper and pg_catalog.pg_has_role(c.relowner, 'usage'))
"""


@dataclass(frozen=True)
class StoredManifest:
    """The staging table of a manifest, and the manifest."""

    table: sql.Identifier
    manifest: tuple[Result, ...]


def keep(connection: psycopg.Connection[Any], batch: Batch, manifest: Sequence[Result]) -> None:
    """Record everything that an application has staged for its attempt on the batch. It counts from this commit on."""
    with connection.transaction():
        table = create(connection, batch, TARGET, [("manifest", "jsonb"), ("kept_at", "timestamptz")])
        connection.execute(
            sql.SQL("insert into {} (manifest, kept_at) values (%s, pg_catalog.clock_timestamp())").format(
                sql.Identifier(SCHEMA, table)
            ),
            [Jsonb([asdict(staged) for staged in manifest])],
        )


def merge_kept(
    connection: psycopg.Connection[Any],
    batch: Batch,
    at: Callable[[str, str], None] = lambda step, how_far: None,
) -> tuple[Result, ...]:
    """Merge the results of the last application that finished this attempt on the batch, and return its manifest.

    Several applications may work on one attempt, as after a retry of the task that started the first. Each stages its
    own results, and only the last to finish counts. Raises BatchNotFinished if none has finished.
    """
    stored = _last(connection, batch)
    if stored is None:
        raise BatchNotFinished(
            f"{batch.feed}: nothing was merged: no application has staged results for attempt {batch.attempt} on "
            f"batch {batch.id}, or a crash of the server has emptied them. Run the application again, with `with "
            f"batch_job(handle)`. If it does not stage its results, ack the batch with staged=False"
        )
    merge(connection, batch, stored.manifest, at)
    connection.execute(sql.SQL("drop table {}").format(stored.table))
    return stored.manifest


def _last(connection: psycopg.Connection[Any], batch: Batch) -> StoredManifest | None:
    manifests = []
    for name in _tables(connection, batch):
        table = sql.Identifier(SCHEMA, name)
        try:
            stored = rows(connection, sql.SQL("select kept_at, manifest from {}").format(table))
        except SchemaMissing as error:
            raise StaleClaim(
                f"{batch.feed}: another ack of attempt {batch.attempt} on batch {batch.id} was faster, so nothing was "
                "merged"
            ) from error
        # A crash may have emptied the table.
        manifests += [
            (kept_at, StoredManifest(table, tuple(map(result_of, manifest)))) for kept_at, manifest in stored
        ]
    return max(manifests, key=lambda one: one[0])[1] if manifests else None


def _tables(connection: psycopg.Connection[Any], batch: Batch) -> list[str]:
    query = sql.SQL(CANDIDATES).format(schema=SCHEMA, prefix=prefix(batch))
    named = [(name, _comment(comment)) for name, comment in rows(connection, query)]
    return [
        name
        for name, content in named
        if [content.get(part) for part in ("batch_id", "version", "attempt", "target")]
        == [batch.id, batch.version, batch.attempt, TARGET]
    ]


def _comment(text: str | None) -> dict[str, Any]:
    try:
        content = json.loads((text or "").removeprefix("pgchange "))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
