"""Let a table of results follow the columns of its source: new columns, longer strings and wider numbers.

A change is made only if PostgreSQL neither rewrites nor reads the table for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, sql

from airflow_pgchange.errors import ConsumerBusy, MergeRefused, PermissionDenied
from airflow_pgchange.feeds.connections import read_committed
from airflow_pgchange.feeds.queries import rows
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.results.column_comparison import Compared, SourceColumn, compared, read_again
from airflow_pgchange.results.target import look_up
from airflow_pgchange.results.type_changes import type_change

log = logging.getLogger(__name__)

LOCK_TIMEOUT = "3s"
"""How long a change waits for transactions that use the table. It is short because later transactions queue behind it."""

_OWNER = """
select pg_catalog.pg_has_role(c.relowner, 'usage'), pg_catalog.pg_get_userbyid(c.relowner)::text, current_user::text
from pg_catalog.pg_class as c where c.oid = pg_catalog.to_regclass({table})
"""


@dataclass(frozen=True)
class Source:
    """The columns that a table of results should get, and the name of the table or frame that has them."""

    name: str
    columns: Sequence[SourceColumn]


@dataclass(frozen=True)
class _Alteration:
    """A change of one column, as a statement. ``refused`` says why it is not run, and what to do; None if it is run."""

    column: str
    statement: str
    refused: str | None
    changes_type: bool = False


def evolve(
    results: psycopg.Connection[Any],
    target: str,
    source: Source | None,
    check: Callable[[], object],
) -> list[str]:
    """Give ``target`` the columns of ``source``, unless that is None. Return the statements that were run, and log
    them.

    The statements and ``check`` share a transaction, which is rolled back if ``check`` raises. Several workers may call
    this at once, because each compares the columns again when it has locked the table. If a change cannot be made,
    raises MergeRefused with the statement that makes it, before any statement is run. Raises PermissionDenied if the
    role does not own the table, and ConsumerBusy if other transactions use it for longer than ``LOCK_TIMEOUT``.
    """
    if source is None or not look_up(results, target).is_table:
        check()
        return []
    alterations = _alterations(results, target, source)
    if not alterations:
        check()
        return []
    _check_owner(results, target, alterations)
    with read_committed(results):
        _lock(results, target)
        alterations = _alterations(results, target, source)
        for alteration in alterations:
            _run(results, target, alteration)
        check()
    for alteration in alterations:
        log.warning("%s follows %s: ran `%s`", target, source.name, alteration.statement)
    return [alteration.statement for alteration in alterations]


def _alterations(results: psycopg.Connection[Any], target: str, source: Source) -> list[_Alteration]:
    alterations = [
        alteration
        for each in compared(results, target, source.columns)
        if (alteration := _alteration(each, target, source.name)) is not None
    ]
    refused = [alteration.refused for alteration in alterations if alteration.refused is not None]
    widened = {
        each.column: each.statement for each in alterations if each.changes_type and each.refused is None
    }
    refused += [
        f'{made} of {target} depends on "{column}", and PostgreSQL would read the whole table to make it again: run '
        f"`{widened[column]}`"
        for column, made in read_again(results, target, list(widened))
    ]
    if refused:
        raise MergeRefused(
            f"{target} does not follow {source.name} by itself: {'; '.join(refused)}; or leave such a column out of "
            f"the merge"
        )
    return alterations


def _alteration(each: Compared, target: str, of: str) -> _Alteration | None:
    if each.target_type is None:
        return _added(each, target, of)
    change = None if each.source_type is None else type_change(each.source_type, each.target_type)
    if change is None or each.generated:
        return None
    source = each.column
    if not source.declared and not (change.in_place and source.modifier >= 0):
        return None
    # Name the collation, or the column would get the default collation.
    collate = "" if each.collation is None else f" collate {each.collation}"
    statement = (
        sql.SQL("alter table {} alter column {} type {}{}")
        .format(table_identifier(target), sql.Identifier(source.name), sql.SQL(change.type), sql.SQL(collate))
        .as_string(None)
    )
    refused = (
        f'"{source.name}" is {each.source_type} in the source and {each.target_type} in the target, and PostgreSQL '
        f"would rewrite the table to change that: run `{statement}`"
    )
    return _Alteration(source.name, statement, None if change.in_place else refused, changes_type=True)


def _added(each: Compared, target: str, of: str) -> _Alteration:
    source = each.column
    statement = (
        sql.SQL("alter table {} add column if not exists {} {}")
        .format(
            table_identifier(target), sql.Identifier(source.name), sql.SQL(each.source_type or source.type)
        )
        .as_string(None)
    )
    refused = None
    if each.source_type is None:
        refused = (
            f'"{source.name}" of {of} has the type {source.type}, which the results database lacks: create the type '
            f"there, and run `{statement}`"
        )
    elif each.stranger is not None:
        refused = (
            f'"{source.name}" has the type {each.source_type}, which belongs to {each.stranger} in the results database. '
            f"Its checks would run with the rights of this role: let this role or a superuser own the type, or "
            "run "
            f"`{statement}`"
        )
    elif source.filled is not None:
        refused = (
            f'"{source.name}" of {of} {source.filled}, and rows that were merged before would lack its values: run '
            f"`{statement}`, and backfill the table"
        )
    elif each.constrained:
        refused = (
            f'"{source.name}" has the type {each.source_type}, a domain with constraints or a default, and '
            f"PostgreSQL would rewrite the table to add it: run `{statement}`"
        )
    return _Alteration(source.name, statement, refused)


def _check_owner(results: psycopg.Connection[Any], target: str, alterations: Sequence[_Alteration]) -> None:
    shown = table_identifier(target).as_string(None)
    for owns, owner, role in rows(results, sql.SQL(_OWNER).format(table=shown)):
        if not owns:
            statements = "; ".join(alteration.statement for alteration in alterations)
            raise PermissionDenied(
                f"{role}, the role of the results connection, does not own {target} and cannot alter it. Let its "
                f"owner {owner} run `{statements}`, or grant {owner} to {role}"
            )


def _lock(results: psycopg.Connection[Any], target: str) -> None:
    query = sql.SQL("set local lock_timeout = {}; lock table {} in access exclusive mode")
    try:
        results.execute(query.format(LOCK_TIMEOUT, table_identifier(target)))
    except errors.LockNotAvailable as error:
        raise ConsumerBusy(
            f"{target} cannot follow its source, because other transactions used it for {LOCK_TIMEOUT}. Nothing was "
            f"changed, and the batch is tried again; pg_locks shows those transactions"
        ) from error


def _run(results: psycopg.Connection[Any], target: str, alteration: _Alteration) -> None:
    try:
        results.execute(sql.SQL(alteration.statement))
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:
        detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
        raise MergeRefused(
            f"{target} cannot follow its source: PostgreSQL refuses `{alteration.statement}`: "
            f"{error.diag.message_primary}{detail}: nothing was changed"
        ) from error
