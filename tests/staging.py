"""Results as a job's writers leave them in staging."""

from __future__ import annotations

from psycopg import sql

from airflow_pgchange.feeds import Batch
from airflow_pgchange.results.merge import Staged
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.staging import create

BATCH = Batch(id="batch-1", feed="commits:test/0", version=1, attempt=2, count=3, slices=(), bounds={})
LOSER = 99

PLACES = (
    "create table public.places (id bigint primary key, code text unique, area numeric, "
    "note text default 'none')"
)


def stage(connection, target, key, mode, columns, rows, *, of_ids=(), touched=(), losers=(), batch=BATCH):
    """Stage rows as the writers of a job do, and return a description of the staged results.

    The winning attempts are the task attempts 0 and 1; ``losers`` are rows of another attempt. ``of_ids`` and
    ``touched`` are the rows and ids of a mirror.
    """
    table = create(connection, batch, target, list(columns.items()))
    names = sql.SQL(", ").join(map(sql.Identifier, ["pgchange_attempt", "pgchange_touched", *columns]))
    winners = {}

    def insert(*values):
        query = sql.SQL("insert into {} ({}) values ({})").format(
            sql.Identifier("pgchange_staging", table), names, sql.SQL(", ").join(map(sql.Literal, values))
        )
        connection.execute(query)
        winners[values[0]] = winners.get(values[0], 0) + 1

    for number, row in enumerate(rows):
        insert(number % 2, None, *row)
    for row in of_ids:
        insert(0, False, *row)
    for id_ in touched:
        insert(1, True, *(id_ if name in key else None for name in columns))
    for row in losers:
        insert(LOSER, None, *row)
    winners.pop(LOSER, None)
    kinds, counts = tuple(columns.items()), tuple(winners.items())
    return Staged(target, tuple(key), Mode(mode), table, kinds, counts, batch.id, batch.attempt)


def rows_of(connection, query):
    """Return the result of a query."""
    return connection.execute(query).fetchall()
