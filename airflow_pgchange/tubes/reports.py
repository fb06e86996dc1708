"""Reports: tables that a query computes from several tables of a tube, recomputed for the ids that were touched."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect, read_only
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.feeds.reading import check_whole
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached import Attached
from airflow_pgchange.results.compared import columns_of_query
from airflow_pgchange.results.evolving import Source
from airflow_pgchange.results.evolving import evolve as evolve_target
from airflow_pgchange.results.fitting import EXACT, INTEGERS
from airflow_pgchange.results.merge import merge, validate
from airflow_pgchange.results.modes import Mode
from airflow_pgchange.results.staging import ATTEMPT, SCHEMA, TOUCHED, Staged, create

IDS = "%(ids)s"
WRITER = 0
"""The attempt under which rows are staged: there is one writer."""

COMMA = sql.SQL(", ")


def recompute(
    transaction: ConsumerTransaction, query: str, into: str, key: str, *, evolve: bool = False
) -> None:
    """Replace the rows of the batch's ids in the table ``into`` by the rows that ``query`` returns, and ack the batch.

    The query is SQL. It names the ids as ``%(ids)s``, an array of ``bigint``, and any other percent sign is written
    ``%%``. It returns at most one row for each of these ids, with the id in the column ``key``. Its columns are written
    to the columns of ``into`` with the same names. An id for which it returns no row is deleted there. ``into`` needs a
    unique index on ``key`` alone. The query runs with the rights of the connection to the changes, so only people with
    these rights should write it.

    The report is right however many transactions write its tables meanwhile. The query begins after the claim, so it sees
    every change of the batch. A change that it does not see is committed later, with pods that this batch does not
    have, so a later batch computes the id again. The later batch of an id always sees more, because one id is never in
    two batches at once: therefore all tables of the tube must be attached under one shard.

    If the changes and ``into`` are in one database, the rows and the progress are one transaction: exactly once. If
    they are in two databases, the query runs where the changes are, in a transaction that only reads. A crash can then
    repeat a batch, which computes the same ids again and does no harm.

    ``evolve``: the table first gets the query's new columns, its longer strings and wider numbers, in a short transaction
    of its own. The role of the results must own it.

    Raises InvalidArgument for another feed than a TubeFeed, for a query without ``%(ids)s`` and for tables under several
    shards; MergeRefused if the rows do not fit into the table, or are not one row for each id; PermissionDenied if row
    security hides rows of an attached table; psycopg's own error if the query fails.
    """
    feed, batch = transaction.feed, transaction.batch
    if not isinstance(feed, TubeFeed):
        raise InvalidArgument(f"{feed.name} is a {feed.kind} feed: only a tube has ids to recompute")
    report = Report(query, into, key)
    ids = sorted({int(str(change.id)) for change in transaction.changes()})
    if evolve:
        with connect(transaction.results, primary=True) as results:
            # The consumer's own transaction would keep its locks on what the query reads, also on the report itself.
            report.evolve(
                results if transaction.reader is transaction.connection else transaction.reader, results
            )

    def write(results: psycopg.Connection[Any]) -> None:
        assert batch is not None
        source = transaction.reader
        _check_tables(source, feed)
        transaction.progress.at(f"computing {into}", f"{len(ids):,} ids")
        staged = report.stage(source, results, batch, ids)
        transaction.progress.begin("merge")
        merge(results, batch, [staged], transaction.progress.at)

    transaction.ack(write)


@dataclass(frozen=True)
class Report:
    """A table ``into`` that has one row for each id, found by ``key``, and the query that computes the rows of some ids.

    Raises InvalidArgument for a query without ``%(ids)s``.
    """

    query: str
    into: str
    key: str

    def __post_init__(self) -> None:
        check_query("query", self.query)

    def stage(
        self,
        source: psycopg.Connection[Any],
        results: psycopg.Connection[Any],
        batch: Batch,
        ids: Collection[int],
    ) -> Staged:
        """Compute the rows of the ids on ``source``, and stage them on ``results`` together with the ids.

        Raises MergeRefused if they do not fit.
        """
        columns = self._columns(source)
        validate(results, self.into, [self.key], Mode.MIRROR, columns)
        table = create(results, batch, self.into, list(columns.items()))
        staging = sql.Identifier(SCHEMA, table)
        computed = self._rows(source, columns, ids, staging, results)
        self._check_ids(results, staging, ids)
        results.execute(
            sql.SQL("insert into {} ({}) select {}, true, unnest({}::bigint[])").format(
                staging, _names([ATTEMPT, TOUCHED, self.key]), WRITER, list(ids)
            )
        )
        return Staged(
            target=self.into,
            key=(self.key,),
            mode=Mode.MIRROR,
            table=table,
            columns=tuple(columns.items()),
            winners=((WRITER, computed + len(ids)),),
            batch_id=batch.id,
            attempt=batch.attempt,
        )

    def evolve(self, source: psycopg.Connection[Any], results: psycopg.Connection[Any]) -> None:
        """Let the table follow the columns of the query. Raises MergeRefused, PermissionDenied, ConsumerBusy."""
        fit = partial(validate, results, self.into, [self.key], Mode.MIRROR, self._columns(source))
        query = Source("the query", columns_of_query(source, self._bound(source, [])))
        evolve_target(results, self.into, query, fit)

    def _columns(self, source: psycopg.Connection[Any]) -> dict[str, str]:
        """Return the names of the query's columns, and the types in which they are staged."""
        described = source.execute(
            sql.SQL("select * from ({}\n) as r limit 0").format(self._bound(source, []))
        ).description
        assert described is not None
        names = [column.name for column in described]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise MergeRefused(
                f'{self.into}: the query returns several columns "{twice[0]}": give each a name of its own with as'
            )
        kinds = ask(
            source,
            sql.SQL(
                "select array(select pg_catalog.format_type(u.type, -1) "
                "from unnest({}::oid[]) with ordinality as u(type, n) order by u.n)"
            ).format([column.type_code for column in described]),
        )
        columns = {
            name: kind if kind.removesuffix("[]") in EXACT else "text"
            for name, kind in zip(names, kinds, strict=True)
        }
        if columns.get(self.key) not in INTEGERS:
            found = dict(zip(names, kinds, strict=True)).get(self.key, "not among its columns")
            raise MergeRefused(
                f'{self.into}: the query must return the ids as integers in the column "{self.key}", which is {found}'
            )
        return {**columns, self.key: "bigint"}

    def _rows(
        self,
        source: psycopg.Connection[Any],
        columns: dict[str, str],
        ids: Collection[int],
        staging: sql.Identifier,
        results: psycopg.Connection[Any],
    ) -> int:
        """Stage the rows that the query returns, and return their number."""
        # False: the merge need not look again whether the rows have ids of the batch.
        query = sql.SQL("select {}, false, {} from ({}\n) as r").format(
            WRITER,
            COMMA.join(
                sql.SQL("{}::{}").format(sql.Identifier(name), sql.SQL(kind))
                for name, kind in columns.items()
            ),
            self._bound(source, ids),
        )
        names = _names([ATTEMPT, TOUCHED, *columns])
        if source is results:
            return results.execute(sql.SQL("insert into {} ({}) {}").format(staging, names, query)).rowcount
        into = sql.SQL("copy {} ({}) from stdin").format(staging, names)
        with read_only(source), source.cursor() as reading, results.cursor() as writing:
            with (
                reading.copy(sql.SQL("copy ({}) to stdout").format(query)) as out,
                writing.copy(into) as taken,
            ):
                for block in out:
                    taken.write(block)
            return writing.rowcount

    def _check_ids(
        self, results: psycopg.Connection[Any], staging: sql.Identifier, ids: Collection[int]
    ) -> None:
        query = sql.SQL(
            "select {key}, count(*) from {staging} group by {key} "
            "having count(*) > 1 or {key} is null or {key} <> all ({ids}::bigint[]) order by {key} limit 1"
        ).format(key=sql.Identifier(self.key), staging=staging, ids=list(ids))
        for found, count in rows(results, query):
            if found is None:
                wrong = f'a row without "{self.key}": leave such rows out'
            elif found not in ids:
                wrong = f"a row {self.key}={found} for an id that it was not asked for: restrict it to {IDS}"
            else:
                wrong = f"{count} rows {self.key}={found}: group them, so that each id has one row"
            raise MergeRefused(f"{self.into}: the query returns {wrong}; nothing was written")

    def _bound(self, connection: psycopg.Connection[Any], ids: Collection[int]) -> sql.SQL:
        """Return the query with the ids filled in."""
        typed = self.query.rstrip("; \r\n\t").replace(IDS, f"{IDS}::bigint[]")
        try:
            text = psycopg.ClientCursor(connection).mogrify(typed.encode(), {"ids": list(ids)})
        except psycopg.ProgrammingError as error:
            raise InvalidArgument(
                f"the query for {self.into} cannot be filled in: {error}: {IDS} is its only placeholder, and any other "
                "percent sign is written %%"
            ) from error
        return _verbatim(text)


def check_query(name: str, query: str) -> None:
    """Raise InvalidArgument for a query that does not name the ids, and would compute the whole report each time."""
    if IDS not in query:
        raise InvalidArgument(
            f"{name} must say for which ids it returns rows, as in `where order_id = any({IDS})`"
        )


def _check_tables(source: psycopg.Connection[Any], feed: TubeFeed) -> None:
    """Raise InvalidArgument if the tables of the tube are under several shards, PermissionDenied if rows of them are
    hidden."""
    tables = Attached.all(feed.tube, ask(source, TubeFeed(feed.tube).attached()))
    for each in tables:
        if each.shard != tables[0].shard:
            raise InvalidArgument(
                f"{tables[0].table} touches tube {feed.tube} under shard {tables[0].shard}, and {each.table} under shard "
                f"{each.shard}, so an id could be in two batches at once: attach all tables of a report under one shard"
            )
        check_whole(source, each.table)


def _names(names: Collection[str]) -> sql.Composed:
    return COMMA.join(map(sql.Identifier, names))


def _verbatim(query: str) -> sql.SQL:
    return sql.SQL(query)
