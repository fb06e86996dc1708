"""Functions that run as their owner check the rights of their caller, and never of the session user."""

from __future__ import annotations

import re

import psycopg
import pytest

from airflow_pgchange.admin import versions
from tests.callers import WAYS, Stranger
from tests.tubes import make

SCHEMAS = [name for system in versions.SYSTEMS for name in (system.schema, system.schema + versions.SEALED)]
RECORDS = {
    "tube.backfill_pause": "who paused a backfill",
    "tube.backfill_cancel": "who cancelled a backfill",
    "pgchange.give_up": "who sent a letter again",
    "default of pgchange.letter": "who gave a batch up",
    "default of tube.backfill": "who started a backfill",
    "default of mbus.temporary": "who made a temporary queue or consumer",
}
"""The only functions that use session_user, to record the acting user."""
SESSION_USER = """
select n.nspname || '.' || p.proname from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
where n.nspname = any (%(schemas)s) and (p.prosrc ~* 'session_user' or pg_get_function_sqlbody(p.oid) ~* 'session_user')
union all
select format('default of %%s', d.adrelid::regclass)
from pg_attrdef as d join pg_class as c on c.oid = d.adrelid
where c.relnamespace::regnamespace::text = any (%(schemas)s) and pg_get_expr(d.adbin, d.adrelid) ~* 'session_user'
union all
select format('view %%s', c.oid::regclass) from pg_class as c
where c.relkind = 'v' and c.relnamespace::regnamespace::text = any (%(schemas)s)
  and pg_get_viewdef(c.oid) ~* 'session_user'
union all
select format('policy on %%s', p.polrelid::regclass) from pg_policy as p
where concat(pg_get_expr(p.polqual, p.polrelid), pg_get_expr(p.polwithcheck, p.polrelid)) ~* 'session_user'
"""
USING = """
select n.nspname::text, r from pg_namespace as n cross join unnest(%s::text[]) as r
where n.nspname like '%%\\_sealed' and has_schema_privilege(r, n.oid, 'usage, create')
"""
SEALED = """
select p.oid::regprocedure::text from pg_proc as p
where p.pronamespace::regnamespace::text like '%\\_sealed' and not (
    p.prosecdef and p.proargnames[1] = 'caller' and p.proargtypes[0] = 'pgchange.caller'::regtype)
"""
NAMING = """
select distinct i.identity, coalesce(pg_get_function_sqlbody(f.oid), pg_get_viewdef(r.ev_class)) from pg_depend as d
join pg_proc as p on d.refclassid = 'pg_proc'::regclass and d.refobjid = p.oid
left join pg_proc as f on d.classid = 'pg_proc'::regclass and f.oid = d.objid
left join pg_rewrite as r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid
cross join lateral pg_identify_object(d.classid, d.objid, 0) as i
where p.pronamespace::regnamespace::text like '%\\_sealed'
"""
CALLED = r"\w+_sealed\.\"?[\w$]+\"?\(\(\(CURRENT_USER\)::pgchange\.caller COLLATE \"default\"\)[,)]"
"""The pattern of a call of a sealed function that gets the calling role as an argument, as PostgreSQL prints it."""


def test_session_user_records_who_acted_and_grants_nothing(connection):
    found = {name for (name,) in connection.execute(SESSION_USER, {"schemas": SCHEMAS}).fetchall()}
    assert found <= set(RECORDS)


def test_nobody_can_name_a_function_that_is_told_its_caller(connection, role):
    """Call every function that grants a persona. None of these personas may use a sealed schema."""
    who = role("persona").name
    grants = connection.execute(
        "select p.oid::regproc::text from pg_proc as p where p.pronamespace::regnamespace::text = any (%s) "
        "and p.oid::regprocedure::text ~ '[.]grant_.*[(]regrole[)]$'",
        [SCHEMAS],
    ).fetchall()
    for (grant,) in grants:
        connection.execute(f"select {grant}(%s::regrole)", [who])
    assert connection.execute(USING, [[who, "public"]]).fetchall() == []


def test_default_privileges_do_not_open_a_sealed_schema(connection, role):
    who = role("curious").name
    connection.execute(f"alter default privileges grant usage on schemas to public, {who}")
    connection.execute("select pgchange.make_sealed('topology')")
    assert connection.execute(USING, [[who, "public"]]).fetchall() == []
    connection.execute(f"alter default privileges revoke usage on schemas from public, {who}")


FACED = """
select distinct format('%%s calls %%s.%%s', p.oid::regprocedure, n.nspname, s.proname)
from pg_proc as p
cross join lateral regexp_replace(regexp_replace(p.prosrc, '--[^\\n]*', '', 'g'), %(text)s, '', 'g') as code
cross join pg_proc as s
cross join lateral (select regexp_replace(s.pronamespace::regnamespace::text, '_sealed$', '')) as n(nspname)
where p.pronamespace::regnamespace::text = any (%(schemas)s) and 'caller' = any (p.proargnames)
  and s.pronamespace::regnamespace::text ~ '_sealed$' and s.proname !~ '[$]'
  and code ~ format('\\m%%s\\.%%s\\(', n.nspname, s.proname)
"""
"""Calls of a public function in code where the owner is the current user: the function would take the owner for the
caller."""


def test_a_function_that_takes_a_caller_calls_no_public_face(connection):
    parameters = {"schemas": SCHEMAS, "text": "'[^']*'"}
    assert connection.execute(FACED, parameters).fetchall() == []
    connection.execute(
        "create function pgchange.planted(caller name) returns bigint language plpgsql as "
        "$$ begin return (select count(*) from pgchange.watchers()); end $$"
    )
    assert connection.execute(FACED, parameters).fetchall() == [
        ("pgchange.planted(name) calls pgchange.watchers",)
    ]


FORGED = (
    "'postgres'",
    "'postgres'::name",
    "('{postgres}'::pgchange.caller[])[1]",
    '(jsonb_populate_record(null::public.kept, \'{"one": "postgres"}\')).one',
    "(select x.one from (select 'postgres'::pgchange.caller as one) as x)",
)


@pytest.mark.parametrize("caller", FORGED)
def test_pg_read_all_data_calls_no_sealed_function_as_another_role(connection, role, connect_to, caller):
    """PostgreSQL gives such roles USAGE on every schema."""
    who = role("reader")
    connection.execute(
        f"grant pg_read_all_data to {who.name}; create table public.kept (one pgchange.caller)"
    )
    session = connect_to(who.conninfo)
    query = "select * from pgchange_sealed.watchers({})"
    with pytest.raises(psycopg.errors.CheckViolation, match="is_the_current_user"):
        session.execute(query.format(caller))
    assert session.execute(query.format("current_user")).fetchall() == []


@pytest.mark.parametrize("note", ["note_watchers", "note_samples"])
def test_pg_read_all_data_records_nothing_without_the_right_to(connection, role, connect_to, note):
    who = role("reader")
    connection.execute(f"grant pg_read_all_data to {who.name}")
    session = connect_to(who.conninfo)
    with pytest.raises(
        psycopg.errors.InsufficientPrivilege, match=f"permission denied for function .*{note}"
    ):
        session.execute(f"select pgchange_sealed.{note}(current_user, '[]')")


def test_nobody_keeps_a_caller_for_another_role_to_use(connection, role, connect_to):
    who = role("keeper")
    connection.execute(
        f"create schema {who.name} authorization {who.name}; grant usage on schema pgchange to {who.name}"
    )
    session = connect_to(who.conninfo)
    for kept in ("table {}.kept (one pgchange.caller)", "domain {}.kept as pgchange.caller"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for type"):
            session.execute("create " + kept.format(who.name))


def test_no_caller_at_all_may_do_nothing(connection):
    assert connection.execute("select pgchange.keeps(null, 'event')").fetchone() in ((None,), (False,))


def test_every_sealed_function_is_told_its_caller(connection):
    assert connection.execute(SEALED).fetchall() == []


def test_code_that_names_a_sealed_function_passes_its_own_caller(connection):
    found = connection.execute(NAMING).fetchall()
    assert found
    assert [body for _, body in found if not re.search(CALLED, body)] == []


@pytest.fixture
def stranger(connection, role, connect_to):
    """A role that may look at every feed. Other roles watch, look, and own a tube and a group of events."""
    who = role("stranger")
    make(connection, "t")
    connection.execute('select pgchange.note_watchers(\'[{"feed": "a feed", "kind": "event"}]\')')
    connection.execute(
        'select pgchange.note_samples(\'[{"kind": "event", "consumer": "event:g", "ready": 1, "ready_exact": true}]\')'
    )
    connection.execute("select pgchange.note_claim('event', 'event:g', %s::jsonb)", [BATCH % 1])
    connection.execute(
        "insert into pgmb.subscriptions (group_id, params) values ('g', '{\"topics\": [\"secret\"]}')"
    )
    for grant in ("pgchange.grant_viewer", "pgmb.grant_dispatcher", "tube.grant_consumer"):
        connection.execute(f"select {grant}(%s::regrole)", [who.name])
    return Stranger.with_calls(connection, who, connect_to(who.conninfo), CALLS)


BATCH = '{"id": "7e8f6f0e-3a0b-4a52-9d3a-0d9f6b3f1c1%s", "attempt": 1, "count": 1}'
CALLS = (
    "pgchange.watchers()",
    "pgchange.batches()",
    "pgchange.samples('event', 'event:g')",
    "pgchange.trends()",
    "(select from pgmb.groups() as g where g.topics <> '{}')",
    f"tube.note_attempt('t', 0, 'claimed', '{BATCH % 2}') as n, pgchange.batches()",
)
"""Functions that return more to the owner of the schemas than to readers."""


def test_the_owner_is_told_more_than_a_stranger(connection, stranger):
    found = {call: connection.execute(f"select count(*) from {call} as x").fetchone()[0] for call in CALLS}
    assert [call for call, rows in found.items() if rows == 0] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_strangers_code_is_told_in_a_superusers_session_what_it_is_told_by_itself(
    connection, stranger, way
):
    alone = stranger.by_itself()
    assert set(alone.values()) == {"0 rows"}
    assert stranger.in_session_of(connection, way) == alone
