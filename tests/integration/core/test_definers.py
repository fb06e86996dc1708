"""Functions that run with the rights of their owner. Each is listed with its permitted callers and with its check of the
caller."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import versions

pytestmark = pytest.mark.hstore

OWN = re.compile(r"\$\d+(\$[0-9a-f]+)?$|(?<=_)[0-9a-f]{12}$")
"""The part of a function's name that identifies its queue, consumer or table."""
ITEM = """
create table public.item (id bigint primary key, n integer);
select revision.track('public.item');
select tube.tube_ensure_exists('t');
update tube.tube set predicate = 'n > 0';
select tube.tube_table_ensure_attached('t', 'public.item', 0);
select pgmb.push_table_mutations('public.item');
"""
QUEUES = """
select mbus.create_queue('q', 2, true), mbus.create_queue('r', 2);
select mbus.create_view('q'), mbus.create_trigger('q', 'r');
"""
GRANTS = """
select p.oid::regproc::text from pg_proc as p
where p.pronamespace::regnamespace::text = any (%s) and p.oid::regprocedure::text ~ '[.]grant_.*[(]regrole[)]$'
"""
DEFINERS = """
select n.nspname || '.' || p.proname, p.prorettype = 'trigger'::regtype, p.prosrc,
       has_function_privilege('public', p.oid, 'execute'), n.nspname like '%%\\_sealed',
       array(select r from unnest(%s::text[]) as r where has_function_privilege(r, p.oid, 'execute') order by r)
from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
where p.prosecdef
"""
Connection = psycopg.Connection[Any]


@pytest.fixture
def connection(connect) -> Iterator[Connection]:
    """A database with a table for each kind of capture, queues with and without roles, and objects that belong to
    them."""
    connection = connect()
    connection.execute(ITEM)
    connection.execute(QUEUES)
    yield connection
    connection.execute("select mbus.drop_queue('q')")


@pytest.fixture
def granted(connection, role) -> dict[str, str]:
    """A role for each function that grants rights, and the rights that it got."""
    found = connection.execute(GRANTS, [[system.schema for system in versions.SYSTEMS]]).fetchall()
    roles = {}
    for (grant,) in found:
        who = role(grant.replace(".", "_")).name
        connection.execute(f"select {grant}(%s::regrole)", [who])
        roles[who] = grant.replace("grant_", "")
    return roles


def callers(
    granted: dict[str, str], is_trigger: bool, is_public: bool, is_sealed: bool, roles: list[str]
) -> str:
    if is_sealed:
        return "sealed"
    if is_public:
        return "public"
    if roles:
        return " ".join(sorted(granted[who] for who in roles))
    return "writers" if is_trigger else "nobody"


def entries() -> list[tuple[str, str, str]]:
    """The listed functions, each with its callers and the pattern of its check."""
    asked = tomllib.loads((Path(__file__).parents[2] / "definers.toml").read_text())["asked"]
    return [(name, one["callers"], one.get("by", "")) for one in asked for name in one["functions"].split()]


def test_every_function_that_runs_as_its_owner_is_entered_with_who_may_call_it(connection, granted):
    found = {
        OWN.sub("$", name): callers(granted, is_trigger, is_public, is_sealed, roles)
        for name, is_trigger, _, is_public, is_sealed, roles in connection.execute(
            DEFINERS, [list(granted)]
        ).fetchall()
    }
    assert set(found.items()) ^ {(name, callers) for name, callers, _ in entries()} == set()
    assert len(entries()) == len(found)


def test_every_function_asks_what_its_entry_says(connection, granted):
    sources = defaultdict(list)
    for name, _, source, _, _, _ in connection.execute(DEFINERS, [list(granted)]).fetchall():
        sources[OWN.sub("$", name)].append(source)
    not_asking = [
        name for name, _, by in entries() if not all(re.search(by, source) for source in sources[name])
    ]
    assert not_asking == []


def test_no_function_that_fires_by_itself_can_be_called_or_put_on_another_table(connection, granted):
    """Otherwise a role could attach such a trigger function to its own table, and fire it with any row."""
    rows = connection.execute(DEFINERS, [list(granted)]).fetchall()
    assert [
        name for name, is_trigger, _, is_public, _, roles in rows if is_trigger and (is_public or roles)
    ] == []


CALL = re.compile(r"(?<![\w.])(\w+\.\w+)\s*\(")
OWNERS = "only for members of the owner of the table, which have the rights of the owner"
NOT_REACHED = {
    "pgchange.health(pgchange.consumer_status[])": "warns that letters are left out",
    "pgmb.recapture()": OWNERS,
    "pgmb.recapture(regclass)": OWNERS,
    "revision.mend_key(revision.tracked)": OWNERS,
    "revision.place_triggers(regclass,text)": OWNERS,
    "tube.ack(text,integer,jsonb)": "only for letters that are sent again as they were, and tubes send rows again",
}
"""Functions that call another function only for some callers, and these callers."""


def test_a_role_may_call_each_function_that_its_functions_call(connection, granted):
    """If the role may not call a function that one of its functions calls, that function fails half way."""
    rows = connection.execute(
        "select p.oid::regproc::text, p.oid::regprocedure::text, case when p.prosecdef then '' else p.prosrc end,"
        " array(select r from unnest(%s::text[]) as r where has_function_privilege(r, p.oid, 'execute'))"
        " from pg_proc as p where p.pronamespace::regnamespace::text = any (%s)",
        [list(granted), [system.schema for system in versions.SYSTEMS]],
    ).fetchall()
    may = defaultdict(set)
    for name, _, _, roles in rows:
        may[name] |= set(roles)
    barred = {
        (signature, called): sorted(granted[who] for who in set(roles) - may[called])
        for _, signature, source, roles in rows
        for called in CALL.findall(re.sub(r"--.*|'[^']*'", "", source))
        if called in may and set(roles) - may[called]
    }
    assert {pair: roles for pair, roles in barred.items() if pair[0] not in NOT_REACHED} == {}
    assert {signature for signature, _ in barred} == set(NOT_REACHED)
