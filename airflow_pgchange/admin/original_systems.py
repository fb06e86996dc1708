"""Conflicts with the original systems, whose manuals ours follow, in the same database: schemas, triggers and roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.admin.versions import SYSTEMS, System
from airflow_pgchange.errors import Refused
from airflow_pgchange.feeds.queries import ask, rows

SIGNS: Mapping[str, Sequence[str]] = {
    "revision": ("commit", "commit_queue"),
    "pubsub": ("watermark", "lock_watermark"),
    "tube": ("tube_ensure_exists", "tube_table_ensure_attached"),
    "pgmb": ("read_next_events", "push_table_mutations"),
    "mbus": ("qt_model", "create_consumer"),
}
"""Names that identify a schema of an original system, also after a rename: it has a table, type or function of each."""

# Exclude our own triggers by name. They may remain after our schema was dropped by hand, and do nothing then.
_TRIGGERS = """
select t.tgname::text, c.oid::regclass::text, n.nspname::text,
       t.tgnargs > 0 and pg_catalog.starts_with(t.tgname, c.relname || '_')
       and t.tgname ~ '_after_(insert|update|delete)_trigger$'
from pg_catalog.pg_trigger as t
join pg_catalog.pg_class as c on c.oid = t.tgrelid
join pg_catalog.pg_namespace as h on h.oid = c.relnamespace
join pg_catalog.pg_proc as p on p.oid = t.tgfoid
join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
where not t.tgisinternal and t.tgparentid = 0 and h.nspname <> {schema} and p.proname !~ '^pgchange_'
  and (n.nspname = {schema}
       or p.prosrc ~ ('(^|[^.[:alnum:]_"])"?' || {schema} || '"?\\s*[.]')
       or pg_catalog.array_to_string(p.proconfig, ' ') ~ ('search_path=.*\\m' || {schema} || '\\M'))
order by 2, 1
"""
_BY_AN_ORIGINAL = """
select n.nspname::text
from pg_catalog.pg_namespace as n
where n.nspname <> {schema} and not exists (
    select from pg_catalog.unnest({signs}::text[]) as s(name)
    where not exists (select from pg_catalog.pg_proc as p where p.pronamespace = n.oid and p.proname = s.name)
      and not exists (select from pg_catalog.pg_class as c where c.relnamespace = n.oid and c.relname = s.name))
"""
_ROLES = """
select r.rolname::text, pg_catalog.shobj_description(r.oid, 'pg_authid') from pg_catalog.pg_roles as r
where pg_catalog.starts_with(r.rolname, 'mbus_' || pg_catalog.current_database() || '_')
order by r.rolname
"""


@dataclass(frozen=True)
class _Trigger:
    """A trigger, its table, and the schema of its function.

    ``attaches``: the trigger's name is that of a trigger with which an original attaches a table to a tube. The functions
    of such triggers can be in any schema.
    """

    name: str
    table: str
    schema: str
    attaches: bool

    def __str__(self) -> str:
        return f"{self.name} on {self.table}"

    @property
    def drop(self) -> str:
        return f"drop trigger {sql.Identifier(self.name).as_string(None)} on {self.table}"


def _triggers(connection: psycopg.Connection[Any], schema: str) -> list[_Trigger]:
    """Return foreign triggers on tables outside a schema whose functions are in the schema or use it."""
    return [_Trigger(*row) for row in rows(connection, sql.SQL(_TRIGGERS).format(schema=schema))]


def foreign(
    connection: psycopg.Connection[Any], systems: Sequence[System], schemas: Sequence[str]
) -> Refused:
    """Return the error for existing ``schemas`` that are not ours but have the names that these systems need."""
    names = ", ".join(schemas)
    triggers = [trigger for system in systems for trigger in _triggers(connection, system.schema)]
    used = f"; triggers that use it: {', '.join(map(str, triggers))}" if triggers else ""
    first = f"these triggers (`{_dropped(triggers)}`) and then " if triggers else ""
    gone = {system.folder for system in systems}
    options = " ".join(
        f"--without {system.folder}"
        for system in SYSTEMS
        if system.needs and (system.folder in gone or gone.intersection(system.needs))
    )
    leave_out = f", leave ours out (`airflow-pgchange install {options}`)" if "core" not in gone else ""
    return Refused(
        f"schema {names} is there and is not ours{used}: install into another database{leave_out}, or, if nobody uses it "
        f"any more, drop {first}the schema. Do not rename it: functions name the schema that they use, so writes that "
        "call them would fail. Nothing was changed"
    )


def _dropped(triggers: Sequence[_Trigger]) -> str:
    return "; ".join(trigger.drop for trigger in triggers)


def refuse_left_over(connection: psycopg.Connection[Any], systems: Sequence[System]) -> None:
    """Raise Refused if triggers of an original system, which was renamed or dropped, would write into a new schema."""
    for system in systems:
        signs = list(SIGNS.get(system.schema, ()))
        if not signs:
            continue
        query = sql.SQL(_BY_AN_ORIGINAL).format(schema=system.schema, signs=signs)
        renamed = {name for (name,) in rows(connection, query)}
        left = [
            trigger
            for trigger in _triggers(connection, system.schema)
            if trigger.schema in renamed or (system.schema == "tube" and trigger.attaches)
        ]
        if left:
            raise Refused(
                f"triggers of another system would write into schema {system.schema} of ours, which their functions "
                f"name: {', '.join(map(str, left))}. Drop them if nobody uses that system any more: "
                f"`{_dropped(left)}`; or install into another database; nothing was changed"
            )


def refuse_roles(connection: psycopg.Connection[Any], systems: Sequence[System]) -> None:
    """Raise Refused if the admin role of the message queues exists already and belongs to another system."""
    if not any(system.schema == "mbus" for system in systems) or not _may_make_roles(connection):
        return
    database = ask(connection, "select pg_catalog.current_database()")
    admin, mark = f"mbus_{database}_admin", f"mbus admin in database {database}"
    marks = dict(rows(connection, _ROLES))
    if marks.get(admin, mark) == mark:
        return
    # The prefix of a role's name is not enough: another database whose name begins with this one's can have such roles.
    # The comments of our roles name their database, so check the comment.
    theirs = [name for name, comment in marks.items() if not (comment or "").startswith("mbus ")]
    ways = ["leave the queues out: `airflow-pgchange install --without mbus`"]
    if admin in theirs:
        dropped = "; ".join(
            sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)).as_string(None)
            for name in theirs
        )
        statement = sql.SQL("comment on role {} is {}").format(sql.Identifier(admin), mark).as_string(None)
        ways = [
            f"drop the roles that another system left here: `{dropped}`",
            f"keep its members as the admins of ours: `{statement}`",
            *ways,
        ]
    comment = f" ({marks[admin]})" if marks[admin] else ""
    raise Refused(
        f"role {admin} is there and is not ours{comment}, and message queues need a role of this name: "
        f"{', or '.join(ways)}; nothing was changed"
    )


def _may_make_roles(connection: psycopg.Connection[Any]) -> bool:
    query = (
        "select r.rolsuper or r.rolcreaterole from pg_catalog.pg_roles as r where r.rolname = current_user"
    )
    return any(may for (may,) in rows(connection, query))
