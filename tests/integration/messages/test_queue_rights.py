"""Every function as every role, over real connections."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from tests.queue_calls import CONSUME, DMQ, EVERY, FREE, KEEP, LOOK, MAKE, OTHER, POST, UNOPENED
from tests.queues import drain, one, post, there

pytestmark = pytest.mark.hstore

DENIED = "Access denied"
REFUSED = f"{DENIED}|permission denied for function create_(view|run_function)$"

ALLOWED = {
    "nobody": FREE,
    "post_q": FREE | POST | DMQ,
    "consume_q_by_default": FREE | CONSUME | LOOK | DMQ,
    "consume_q_by_other": FREE | OTHER | LOOK | DMQ,
    "admin_q": FREE | POST | CONSUME | OTHER | LOOK | KEEP | DMQ,
    "admin": FREE | POST | CONSUME | OTHER | LOOK | KEEP | MAKE | DMQ,
}
FAILS = {
    "claim": "claimed without its lock",
    "ack": "no longer as it was claimed",
    "skip": "is at work, or acked",
    "skip_batch": "has no batch in work",
    "lease": "is not where batch",
    "resume": "is not where batch",
    "try_again": "still in queue q",
    "post_temp": "Unknown queue:temp.x",
    "consume_temp": "Unknown queue:temp.x",
}
"""The answers to permitted callers if there is nothing to do."""


def function(call):
    return call.partition("(")[0].removeprefix("mbus.")


@pytest.mark.parametrize("right", ALLOWED)
def test_a_role_may_do_what_it_was_granted_and_nothing_else(owner, role, connect_to, right):
    who = role("user")
    if right != "nobody":
        owner.execute(f"grant mbus_{owner.info.dbname}_{right} to {who.name}")
    session = connect_to(who.conninfo, autocommit=False)
    for call in sorted(EVERY):
        post(owner, 1)
        if call in ALLOWED[right] and function(call) in FAILS:
            with pytest.raises(psycopg.Error, match=FAILS[function(call)]):
                session.execute(f"select * from {call}")
        elif call in ALLOWED[right]:
            session.execute(f"select * from {call}")
        else:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=REFUSED):
                session.execute(f"select * from {call}")
        session.rollback()


def test_every_function_that_is_open_to_all_is_among_those_that_the_roles_try(owner):
    opened = owner.execute(
        "select distinct proname from pg_proc where pronamespace = 'mbus'::regnamespace "
        "and has_function_privilege('public', oid, 'execute') and proname !~ '_r(_by_default)?$'"
    ).fetchall()
    assert {row[0] for row in opened} == set(map(function, EVERY)) - UNOPENED


def test_functions_that_take_sql_are_not_open_to_all_roles(owner):
    """Functions with a selector run as their caller. Only the owner may call the function that evaluates it."""
    opened = owner.execute(
        "select proname from pg_proc where pronamespace = 'mbus'::regnamespace and prosecdef "
        "and has_function_privilege('public', oid, 'execute') and proargnames && '{selector,p_selector,exec}'"
    ).fetchall()
    assert opened == []
    assert not one(
        owner,
        "select bool_or(has_function_privilege('public', oid, 'execute')) from pg_proc "
        "where pronamespace = 'mbus'::regnamespace and (proname = any (%s) or proname ~ '_selecting_')",
        sorted(UNOPENED),
    )


def test_no_role_reaches_the_tables_behind_the_functions(owner, role, connect_to):
    """Rights only add up: if a role with every right is refused, so is a role with fewer."""
    who = role("user")
    for right in ALLOWED:
        if right != "nobody":
            owner.execute(f"grant mbus_{owner.info.dbname}_{right} to {who.name}")
    session = connect_to(who.conninfo)
    post(owner, 1)
    tables = ['"log$q"', "dmq", "tempq", "queue", "consumer", "position", "level", "apart", "receipt"]
    statements = [f"delete from mbus.{table}" for table in tables]
    statements += [f"select * from mbus.{relation}" for relation in [*tables, '"qt$q"', '"all$q"']]
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            session.execute(statement)
    for call in [
        "mbus.claim_ids((select null::mbus.queue), 1, 1)",
        'mbus."receive$1"()',
        'mbus."single$1"()',
        "mbus.make_role('mine')",
    ]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            session.execute(f"select {call}")
    assert there(owner) == ["1"]


def test_functions_in_the_schema_of_hstore_are_not_called_by_the_queues(owner, role, connect_to):
    """PostgreSQL's mod() takes two bigints. The stranger's function would fit a call with a bigint and an integer
    better."""
    stranger = role("stranger")
    owner.execute(f"grant create on schema public to {stranger.name}")
    connect_to(stranger.conninfo).execute(
        "create function public.mod(bigint, integer) returns bigint language plpgsql as "
        "$$ begin raise 'called as %', current_user; end $$"
    )
    post(owner, 1)
    assert there(owner) == ["1"]
    assert drain(owner) == ["1"]
    paths = {
        setting
        for (settings,) in owner.execute(
            "select proconfig from pg_proc where pronamespace::regnamespace::text ~ '^mbus' and proconfig is not null"
        )
        for setting in settings
        if setting.startswith("search_path=")
    }
    named = ("pg_catalog, mbus, pg_temp", "pg_catalog, pgchange, pg_temp", "pg_catalog, pg_temp")
    assert paths == {f"search_path={path}" for path in named}


def test_run_on_runs_what_its_caller_could_run(owner, role, connect_to):
    caller = role("caller")
    owner.execute("create table public.pieces (sku text, pieces text); select mbus.create_run_function('q')")
    for granted in (
        "usage on schema mbus",
        "execute on function mbus.run_on_q, mbus.consumen_q_by_default",
        "insert on public.pieces",
    ):
        owner.execute(f"grant {granted} to {caller.name}")
    owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_default to {caller.name}")
    post(owner, 1)
    done = "select mbus.run_on_q('insert into pieces select (each($1.data)).*')"
    assert connect_to(caller.conninfo).execute(done).fetchall() == [(1,)]
    assert owner.execute("table public.pieces").fetchall() == [("n", "1")]


def test_a_role_with_one_consumer_does_not_read_the_batch_of_another_consumer(owner, role, connect_to, db):
    who = role("user")
    owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_other to {who.name}")
    post(owner, 1)
    with ConsumerTransaction(QueueFeed("q"), db) as consumer:
        batch = consumer.claim(10)
        assert len(list(consumer.changes())) == 1
        theirs = "select * from mbus.changes('q', 'other', %s, 0, 9)"
        assert connect_to(who.conninfo).execute(theirs, [Jsonb(dict(batch.bounds))]).fetchall() == []
        consumer.ack()
