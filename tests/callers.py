"""A stranger: a role whose table, view or function runs code of its own in the sessions of other roles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.conftest import Role

Connection = psycopg.Connection[Any]

OWN = """
create table {s}.item (id integer primary key)
    with (autovacuum_analyze_threshold = 0, autovacuum_analyze_scale_factor = 0);
create function {s}.f(integer) returns integer language plpgsql immutable as $$ begin return $1; end $$;
create index item_f on {s}.item ({s}.f(id));
insert into {s}.item values (1);
create materialized view {s}.seen as select {s}.f(id) from {s}.item;
create table {s}.outcome (call text, told text);
create function {s}.run() returns void language plpgsql set search_path = public as $$
declare
    one text;
    found text;
begin
    foreach one in array {calls} loop
        begin
            execute format('select count(*)::text from %s as x', one) into found;
            raise exception using errcode = 'PCUND', message = 'undo it';
        exception when others then
            insert into {s}.outcome values (one, case when sqlstate = 'PCUND' then found || ' rows' else sqlstate end);
        end;
    end loop;
end
$$;
create function {s}.lent() returns void language plpgsql security definer as $$ begin perform {s}.run(); end $$;
grant usage on schema {s} to public;
"""
CHANGED = """
create or replace function {s}.f(integer) returns integer language plpgsql as $$
begin
    if not exists (select from {s}.outcome) then
        perform {s}.run();
    end if;
    return $1;
end
$$;
"""
"""The function of an index. It is declared immutable, but does something else after the index was created."""

WAYS = {
    "analyze": "analyze {s}.item",
    "reindex": "reindex table {s}.item",
    "cluster": "cluster {s}.item using item_f",
    "refresh materialized view": "refresh materialized view {s}.seen",
    "security definer": "select {s}.lent()",
    "set role": "begin; set local role {s}; select {s}.run(); commit",
}
"""Statements of other roles that run the stranger's code in their session."""


@dataclass(frozen=True)
class Stranger:
    """A role with its own schema. It records the results of ``calls`` each time its code runs."""

    role: Role
    session: Connection
    owner: Connection

    @classmethod
    def with_calls(cls, owner: Connection, role: Role, session: Connection, calls: Iterable[str]) -> Stranger:
        owner.execute(f"create schema {role.name} authorization {role.name}")
        listed = ", ".join("'" + call.replace("'", "''") + "'" for call in sorted(calls))
        session.execute(OWN.format(s=role.name, calls=f"array[{listed}]"))
        session.execute(CHANGED.format(s=role.name))
        return cls(role, session, owner)

    def by_itself(self) -> dict[str, str]:
        """Return the results of the calls in the stranger's own session."""
        self.session.execute(f"select {self.role.name}.run()")
        return self.outcome()

    def in_session_of(self, other: Connection, way: str) -> dict[str, str]:
        """Let another role run the stranger's code, and return the results of the calls in that role's session."""
        for statement in WAYS[way].format(s=self.role.name).split("; "):
            other.execute(statement)
        return self.outcome()

    def outcome(self) -> dict[str, str]:
        """Return the result of each call since the last query: the number of rows, or the code of an error."""
        rows = self.owner.execute(f"delete from {self.role.name}.outcome returning call, told").fetchall()
        return dict(rows)
