"""Reports: tables that a query computes from several tables of a tube. They are recomputed for the touched ids."""

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
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.keys import BIGINT, Key, text
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.feeds.reading import check_whole
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import TubeFeed
from airflow_pgchange.results.attached_tables import Attached
from airflow_pgchange.results.column_checks import EXACT, INTEGERS
from airflow_pgchange.results.column_comparison import columns_of_query
from airflow_pgchange.results.merge import merge, validate
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.schema_evolution import Source
from airflow_pgchange.results.schema_evolution import evolve as evolve_target
from airflow_pgchange.results.staging import ATTEMPT, SCHEMA, TOUCHED, Staged, create

IDS = "%(ids)s"
WRITER = 0
"""The attempt number of every staged row. They all have the same, because there is only one writer."""

COMMA = sql.SQL(", ")


def recompute(
    transaction: ConsumerTransaction, query: str, into: str, key: KeyNames, *, evolve: bool = False
) -> None:
    """Replace the rows of the batch's ids in the table ``into`` by the rows that ``query`` returns, and ack the batch.

    The query is SQL. It names the ids as ``%(ids)s``, an array of the type of the tube's ids, such as ``bigint[]`` or
    ``uuid[]``. Any other percent sign is written ``%%``. If the ids have several columns, ``key`` is the list of them.
    The query then names an array for each, as in ``(tenant, no) in (select * from unnest(%(tenant)s, %(no)s))``.

    The query returns at most one row for each of these ids, with the id in the column ``key``. Its columns are written
    to the columns of ``into`` with the same names. An id for which it returns no row is deleted there. ``into`` needs a
    unique index on exactly ``key``. The query runs with the rights of the connection to the changes, so only people
    with these rights should write it.

    The report is right however many transactions write its tables meanwhile. The query begins after the claim, so it
    sees every change of the batch. A change that it does not see is committed later, with pods that this batch does not
    have. So a later batch computes the id again. The later batch of an id always sees more, because an id is never in
    two batches at once. For this reason all tables of the tube must be attached under one shard.

    If the changes and ``into`` are in one database, the rows and the progress are one transaction: exactly once. If
    they are in two databases, the query runs where the changes are, in a transaction that only reads. A crash can then
    repeat a batch, which computes the same ids again and does no harm.

    ``evolve``: the table first gets the query's new columns, its longer strings and wider numbers, in a short transaction
    of its own. The role of the results must own it.

    Raises InvalidArgument for another feed than a TubeFeed, for a query without ``%(ids)s`` and for tables under
    several shards. Raises MergeRefused if the rows do not fit into the table, or if an id has several rows. Raises
    PermissionDenied if row security hides rows of an attached table, and psycopg's error if the query fails.
    """
    feed, batch = transaction.feed, transaction.batch
    if not isinstance(feed, TubeFeed):
        raise InvalidArgument(f"{feed.name} is a {feed.kind} feed: only a tube has ids to recompute")
    types = BIGINT if batch is None else batch.key
    ids = sorted({change.id for change in transaction.changes()}, key=None if types == BIGINT else text)
    report = Report(query, into, names_of(key), types)
    if evolve:
        with connect(transaction.results, primary=True) as results:
            # Use another connection than the consumer transaction's, which would keep its locks on the tables of the
            # query and on the report.
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
    ``types`` are the types of the columns of the ids.

    Raises InvalidArgument for a query that does not name the ids, and for a key with another number of columns.
    """

    query: str
    into: str
    key: tuple[str, ...]
    types: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.key) != len(self.types):
            raise InvalidArgument(
                f"key has {len(self.key)} columns, but the ids of the tube have {len(self.types)}: "
                f"{', '.join(self.types)}"
            )
        if len(self.key) == 1:
            check_query("query", self.query)
        for name in self.key if len(self.key) > 1 else ():
            if f"%({name})s" not in self.query:
                raise InvalidArgument(
                    "query must restrict its rows to the touched ids, but it does not use %({name})s: write for "
                    "example `where (tenant, no) in (select * from unnest(%(tenant)s, %(no)s))`"
                )

    def stage(
        self,
        source: psycopg.Connection[Any],
        results: psycopg.Connection[Any],
        batch: Batch,
        ids: Collection[Key],
    ) -> Staged:
        """Compute the rows of the ids on ``source``, and stage them on ``results`` together with the ids.

        Raises MergeRefused if they do not fit.
        """
        columns = self._columns(source)
        validate(results, self.into, self.key, Mode.MIRROR, columns, ids=self.types)
        table = create(results, batch, self.into, list(columns.items()))
        staging = sql.Identifier(SCHEMA, table)
        computed = self._rows(source, columns, ids, staging, results)
        id_rows = self._unnested(columns, ids)
        self._check_ids(results, staging, id_rows)
        results.execute(
            sql.SQL("insert into {} ({}) select {}, true, * from {}").format(
                staging, _names([ATTEMPT, TOUCHED, *self.key]), WRITER, id_rows
            )
        )
        return Staged(
            target=self.into,
            key=self.key,
            mode=Mode.MIRROR,
            table=table,
            columns=tuple(columns.items()),
            winners=((WRITER, computed + len(ids)),),
            batch_id=batch.id,
            attempt=batch.attempt,
        )

    def evolve(self, source: psycopg.Connection[Any], results: psycopg.Connection[Any]) -> None:
        """Give the table the columns of the query. Raises MergeRefused, PermissionDenied, ConsumerBusy."""
        fit = partial(
            validate, results, self.into, self.key, Mode.MIRROR, self._columns(source), ids=self.types
        )
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
                f'{self.into}: the query returns several columns "{twice[0]}": give each its own name with as'
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
        for name, type_ in zip(self.key, self.types, strict=True):
            if name not in columns or (columns[name] in INTEGERS) != (type_ == "bigint"):
                actual = dict(zip(names, kinds, strict=True)).get(name, "not among its columns")
                expected = "integers" if type_ == "bigint" else type_
                raise MergeRefused(
                    f'{self.into}: the query must return the ids as {expected} in the column "{name}", which is {actual}'
                )
            if type_ == "bigint":
                columns[name] = type_
        return columns

    def _rows(
        self,
        source: psycopg.Connection[Any],
        columns: dict[str, str],
        ids: Collection[Key],
        staging: sql.Identifier,
        results: psycopg.Connection[Any],
    ) -> int:
        """Stage the rows that the query returns, and return their number."""
        # Stage the rows with false in TOUCHED, because it was checked that they have ids of the batch.
        query = sql.SQL("select {}, false, {} from ({}\n) as r").format(
            WRITER,
            COMMA.join(self._staged(name, kind) for name, kind in columns.items()),
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

    def _staged(self, name: str, kind: str) -> sql.Composed:
        if name in self.key and kind == "text":
            # Use PostgreSQL's output, because a cast of inet to text adds the length of the netmask.
            return sql.SQL("case when {0} is not null then pg_catalog.concat({0}) end").format(
                sql.Identifier(name)
            )
        return sql.SQL("{}::{}").format(sql.Identifier(name), sql.SQL(kind))

    def _unnested(self, columns: dict[str, str], ids: Collection[Key]) -> sql.Composed:
        """Return an expression for the ids as rows, in the types in which the columns of the key are staged."""
        arrays = [
            sql.SQL("{}::{}[]").format(values, sql.SQL(columns[name]))
            for name, values in zip(self.key, self._values(ids), strict=True)
        ]
        return sql.SQL("unnest({})").format(COMMA.join(arrays))

    def _values(self, ids: Collection[Key]) -> list[list[int | str]]:
        """Return the values of each column of the key."""
        parts = [id_ if isinstance(id_, tuple) else (id_,) for id_ in ids]
        return [[part[index] for part in parts] for index in range(len(self.key))]

    def _check_ids(
        self, results: psycopg.Connection[Any], staging: sql.Identifier, id_rows: sql.Composed
    ) -> None:
        keys = [sql.Identifier("s", name) for name in self.key]
        numbers = [sql.Identifier("a", f"k{index}") for index in range(len(keys))]
        query = sql.SQL(
            "select {keys}, count(*), bool_or({missing}), bool_or({first} is null) "
            "from {staging} as s left join {asked} as a({names}) on {same} "
            "group by {keys} having count(*) > 1 or bool_or({first} is null) order by {keys} limit 1"
        ).format(
            keys=COMMA.join(keys),
            missing=sql.SQL(" or ").join(sql.SQL("{} is null").format(key) for key in keys),
            first=numbers[0],
            staging=staging,
            asked=id_rows,
            names=_names([f"k{index}" for index in range(len(keys))]),
            same=sql.SQL(" and ").join(
                sql.SQL("{} = {}").format(key, number) for key, number in zip(keys, numbers, strict=True)
            ),
        )
        for *values, count, is_missing, is_other in rows(results, query):
            row = ", ".join(f"{name}={value}" for name, value in zip(self.key, values, strict=True))
            if is_missing:
                columns = ", ".join(f'"{name}"' for name in self.key)
                wrong = f"a row without {columns}: leave such rows out"
            elif is_other:
                wrong = f"a row {row} for an id that is not in the batch: restrict it to {IDS}"
            else:
                wrong = f"{count} rows {row}: group them, so that each id has one row"
            raise MergeRefused(f"{self.into}: the query returns {wrong}; nothing was written")

    def _bound(self, connection: psycopg.Connection[Any], ids: Collection[Key]) -> sql.SQL:
        """Return the query with the ids filled in."""
        names = ["ids"] if len(self.key) == 1 else list(self.key)
        typed = self.query.rstrip("; \r\n\t")
        for name, type_ in zip(names, self.types, strict=True):
            typed = typed.replace(f"%({name})s", f"%({name})s::{type_}[]")
        try:
            filled = psycopg.ClientCursor(connection).mogrify(
                typed.encode(), dict(zip(names, self._values(ids), strict=True))
            )
        except (psycopg.ProgrammingError, KeyError) as error:
            raise InvalidArgument(
                f"the query for {self.into} cannot be filled in: {error}. {IDS} is its only placeholder; write any "
                f"other percent sign as %%"
            ) from error
        return _verbatim(filled)


def check_query(name: str, query: str) -> None:
    """Raise InvalidArgument for a query without the ids, because it would compute the whole report each time."""
    if IDS not in query:
        raise InvalidArgument(
            f"{name} must restrict its rows to the touched ids, as in `where order_id = any({IDS})`"
        )


def _check_tables(source: psycopg.Connection[Any], feed: TubeFeed) -> None:
    """Raise InvalidArgument if the tables of the tube are under several shards, PermissionDenied if rows of them are
    hidden."""
    tables = Attached.all(feed.tube, ask(source, TubeFeed(feed.tube).attached()))
    for each in tables:
        if each.shard != tables[0].shard:
            raise InvalidArgument(
                f"{tables[0].table} touches tube {feed.tube} under shard {tables[0].shard}, and {each.table} under shard "
                f"{each.shard}, so an id could be in two batches at once. Attach all tables of a report under one shard"
            )
        check_whole(source, each.table)


def _names(names: Collection[str]) -> sql.Composed:
    return COMMA.join(map(sql.Identifier, names))


def _verbatim(query: str) -> sql.SQL:
    return sql.SQL(query)
