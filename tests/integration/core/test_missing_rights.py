"""An error about a missing right names the role that lacks it, and a grant that removes the error."""

from __future__ import annotations

import re
from collections import defaultdict

import psycopg
import pytest

from airflow_pgchange.errors import PermissionDenied, PgChangeError
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.connections import connect as open_connection
from airflow_pgchange.feeds.grants import declared
from airflow_pgchange.feeds.queries import ask
from tests.schemas import possible
from tests.tubes import make, touch

STATEMENTS = """
    select format('select %%s(%%s)', p.oid::regproc, (
               select string_agg(format('null::%%s', format_type(t, null)), ', ' order by n)
               from unnest(p.proargtypes) with ordinality as a(t, n)))
    from pg_proc as p
    where p.pronamespace::regnamespace::text = any (%(schemas)s) and p.prokind = 'f' and p.provariadic = 0
      and p.prorettype <> 'trigger'::regtype and p.proname !~ '^grant_'
      and obj_description(p.oid, 'pg_proc') not like 'Internal to schema%%'
      and has_function_privilege(%(role)s, p.oid, 'execute')
    union all
    select format('select from %%s limit 0', c.oid::regclass)
    from pg_class as c
    where c.relnamespace::regnamespace::text = any (%(schemas)s) and c.relkind in ('r', 'p', 'v')
      and has_table_privilege(%(role)s, c.oid, 'select')
"""
"""A call of each function that a role may execute, with nulls, and a query of each table that it may read."""


@pytest.fixture
def admin(connect, role):
    connection = connect()
    connection.schemas = [system.schema for system in possible(connection)]
    return connection


def granted_by(error, role):
    """Return the statements that the error advises; the error must name the role."""
    text = str(error)
    assert role in text, text
    found = re.search(r"\brun(?: first)?: (.*?)(?=; or |, or |\n|$)", text)
    assert found is not None, text
    assert all(part not in text for part in ("<role>", "CONTEXT", "LINE 1")), text
    return found[1]


def refusal(session, statement):
    """Return the error about a missing right with which a statement fails; None if it has another outcome."""
    try:
        with session.transaction(force_rollback=True):
            ask(session, statement)
    except PermissionDenied as error:
        return error
    except (PgChangeError, psycopg.Error):
        return None
    return None


def granted(admin, session, statement, role):
    """Run the grants of the refusals of a statement until it is not refused, or is for a superuser only, and return
    them. None may be advised twice."""
    told = []
    while (error := refusal(session, statement)) and "connect as postgres" not in str(error):
        told.append(granted_by(error, role))
        assert told.count(told[-1]) == 1, error
        admin.execute(told[-1])
    return told


def test_each_refusal_of_a_function_or_a_table_names_the_grant_that_removes_it(admin, role):
    """It takes seconds, because it calls each public function as a role without rights, and again with the grant."""
    everybody, nobody = role("everybody").name, role("nobody")
    for each in declared():
        if each.schema in admin.schemas:
            admin.execute(each.statement(everybody))
    statements = admin.execute(STATEMENTS, {"schemas": admin.schemas, "role": everybody}).fetchall()
    refused = defaultdict(list)
    with open_connection(nobody.conninfo) as session:
        for (statement,) in statements:
            if error := refusal(session, statement):
                refused[granted_by(error, nobody.name)].append(statement)
        assert sum(map(len, refused.values())) > 0.9 * len(statements)
        # Begin with the smaller roles, because the larger roles include them.
        for grants in sorted(
            refused, key=lambda grants: ("_admin" in grants, "_owner" in grants, "_consumer" in grants)
        ):
            admin.execute(grants)
            for call in refused[grants]:
                assert grants not in granted(admin, session, call, nobody.name), call


def test_the_grant_for_an_event_is_that_of_the_role_that_the_statement_needs(admin, role):
    nobody = role("nobody")
    needed = {
        "select pgmb.claim('g', null, 1, 1)": "consumer",
        "select pgmb.skip_batch('g', 'why')": "admin",
        "insert into pgmb.events (topic, payload) values ('t', '{}')": "writer",
        "insert into pgmb.subscriptions (group_id) values ('g')": "subscriber",
        "update pgmb.config set value = value": "maintainer",
    }
    with open_connection(nobody.conninfo) as session:
        told = {statement: granted_by(refusal(session, statement), nobody.name) for statement in needed}
    assert told == {
        statement: f"select pgmb.grant_{name}('{nobody.name}')" for statement, name in needed.items()
    }


REFUSED = {
    "a condition that is new": (
        "select pgmb.grant_subscriber('{role}')",
        "insert into pgmb.subscriptions (group_id, conditions_sql) values ('g', 'true') returning id",
    ),
    "a table that the role does not own": (
        "select revision.grant_owner('{role}')",
        "select revision.track('public.item')",
    ),
    "a table whose owner may not track it": (
        "select pgchange.grant_reader('{role}'); grant usage on schema revision to {role};"
        "grant execute on all functions in schema revision to {role};"
        "grant select, insert on all tables in schema revision to {role}; alter table item owner to {role};"
        "grant create on schema public to {role}",
        "select revision.track('public.item')",
    ),
    "a table whose owner may not publish": (
        "select pgchange.grant_reader('{role}'); grant usage on schema pgmb to {role};"
        "grant execute on all functions in schema pgmb to {role}; alter table item owner to {role};"
        "grant create on schema public to {role}",
        "select pgmb.push_table_mutations('public.item')",
    ),
    "a table whose owner may not touch": (
        "select tube.grant_consumer('{role}'); alter table item owner to {role}; grant create on schema public to {role};"
        "grant insert (op) on q to {role}",
        "select tube.tube_table_ensure_attached('q', 'public.item')",
    ),
}
"""Statements that are refused though the role may call their function, each after the rights of the role."""


@pytest.mark.parametrize(("rights", "statement"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_of_our_own_names_the_grant_that_removes_it(admin, role, rights, statement):
    admin.execute("create table item (id bigint primary key)")
    admin.execute(f"alter table item owner to {role('keeper').name}")
    make(admin, "q")
    nobody = role("nobody")
    admin.execute(rights.format(role=nobody.name))
    with open_connection(nobody.conninfo) as session:
        assert granted(admin, session, statement, nobody.name)


def test_a_worker_is_told_its_rights_on_the_pods(admin, role):
    make(admin, "q")
    nobody = role("nobody")
    admin.execute(f"select tube.grant_consumer('{nobody.name}'); grant select on q to {nobody.name}")
    touch(admin, 1)
    for _ in range(2):
        try:
            with ConsumerTransaction(TubeFeed("q"), nobody.conninfo) as transaction:
                batch = transaction.claim(1)
                transaction.ack()
        except PermissionDenied as error:
            told = granted_by(error, nobody.name)
            admin.execute(told)
    assert told == f"grant usage on schema public to {nobody.name}; grant delete on public.q to {nobody.name}"
    assert batch.count == 1


@pytest.mark.hstore
@pytest.mark.parametrize("under_roles", [True, False])
def test_a_queue_names_the_role_or_the_functions_that_are_missing(admin, role, under_roles):
    admin.execute("select mbus.create_queue('q', 1, %s)", [under_roles])
    nobody = role("nobody")
    with open_connection(nobody.conninfo) as session:
        for call in ("mbus.post_q('n=>1')", "mbus.consume('q')", "mbus.create_consumer('c', 'q')"):
            assert granted(admin, session, f"select {call}", nobody.name), call


def test_the_current_role_is_named_and_not_the_login(admin, role):
    login, current = role("login"), role("current")
    admin.execute(f"grant {current.name} to {login.name}; alter role {login.name} set role {current.name}")
    with open_connection(login.conninfo) as session:
        error = refusal(session, "select pgmb.claim('g', null, 1, 1)")
    assert granted_by(error, current.name) == f"select pgmb.grant_consumer('{current.name}')"


def test_the_way_of_an_error_through_our_functions_is_logged_at_level_debug_only(admin, role, caplog):
    nobody = role("nobody")
    admin.execute("create table item (id bigint primary key)")
    admin.execute(f"select revision.grant_owner('{nobody.name}')")
    caplog.set_level("DEBUG", "airflow_pgchange")
    with open_connection(nobody.conninfo) as session:
        error = refusal(session, "select revision.track('public.item')")
    assert "PL/pgSQL" not in f"{error} {error.__cause__}"
    assert ["PL/pgSQL function" in record.getMessage() for record in caplog.records] == [True]
