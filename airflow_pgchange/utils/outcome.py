"""The outcome of a task's batches, for events of assets and for lineage."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from airflow_pgchange.admin.versions import STAGING, SYSTEMS
from airflow_pgchange.feeds import outputs
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import SHOWN_BATCHES
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.outputs import Output
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.schema_feed import OfferedFeed
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.lake.tables import POINTERS
from airflow_pgchange.results.staging import Copied, Result, Staged
from airflow_pgchange.results.written_tables import written

Table = tuple[str, str, str]
"""The name of a table: its database, its schema and its own name."""


@dataclass
class Outcome:
    """The committed batches of a task: their number, their latest ids, and the tables that they wrote.

    ``targets`` leaves out tables of this package's schemas. ``lake`` has the last output of each lake table, by the
    table's location. ``sources`` are the tables whose changes the batches had, if lineage is on.
    """

    feed: Feed
    batches: int = 0
    changes: int = 0
    batch_ids: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN_BATCHES))
    targets: set[Table] = field(default_factory=set)
    lake: dict[str, Output] = field(default_factory=dict)
    sources: list[Table] = field(default_factory=list)
    _writing: set[Table] = field(default_factory=set)
    _writing_lake: dict[str, Output] = field(default_factory=dict)
    _merging: dict[Table, set[Copied | None]] = field(default_factory=dict)
    _merged: dict[Table, set[Copied | None]] = field(default_factory=lambda: defaultdict(set))

    @property
    def copied(self) -> dict[Table, set[Copied]]:
        """The tables from which each target has unchanged columns. A target is left out if a callable or an application
        wrote into it, because the origin of those columns is unknown."""
        return {
            target: {source for source in merged if source is not None}
            for target, merged in self._merged.items()
            if None not in merged
        }

    def acked(self, connection: psycopg.Connection[Any], staged: Sequence[Result] = ()) -> None:
        """Note the tables that a batch wrote and the results that were merged, before its transaction commits.

        ``connection`` is the connection to the results.
        """
        ours = {STAGING, *(system.schema for system in SYSTEMS)}
        if isinstance(self.feed, OfferedFeed):
            ours.add(self.feed.schema)
        database = connection.info.dbname
        self._writing_lake = {
            output.location: output for output in outputs.noted(connection) if output.location is not None
        }
        self._writing = {
            (database, schema, name)
            for schema, name in written(connection, ours)
            if not (name == POINTERS and self._writing_lake)
        }
        self._merging = defaultdict(set)
        for result in staged:
            if isinstance(result, Staged):
                self._merging[resolved(connection, result.target)].add(result.copied)

    def committed(self, batch: Batch) -> None:
        """Add a batch whose transaction has committed, with the tables of the last ``acked``."""
        self.batches += 1
        self.changes += batch.count
        self.batch_ids.append(batch.id)
        self.targets |= self._writing
        self.lake |= self._writing_lake
        for target in self._writing:
            self._merged[target] |= self._merging.get(target, {None})

    def summary(self) -> dict[str, Any]:
        """Return the feed, the number of changes and the latest batch ids, as plain JSON."""
        return {"feed": self.feed.name, "changes": self.changes, "batch_ids": list(self.batch_ids)}


def resolved(connection: psycopg.Connection[Any], table: str) -> Table:
    """Return the table to which a name resolves on a connection."""
    query = """
        select n.nspname, c.relname
        from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
        where c.oid = %s::pg_catalog.regclass
    """
    ((schema, name),) = rows(connection, query, [table_identifier(table).as_string(connection)])
    return connection.info.dbname, schema, name
