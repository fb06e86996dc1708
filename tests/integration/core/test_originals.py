"""Our schemas beside the original systems whose manuals they follow: an installation is refused with correct advice, and
nothing changes."""

from __future__ import annotations

import re

import psycopg
import pytest

from airflow_pgchange.admin import schema, versions
from airflow_pgchange.errors import Refused
from tests.originals import ORIGINALS, WRITE
from tests.tubes import one

CAPTURING = {
    "revision": ["enqueue on item"],
    "tube": ["item_q_after_insert_trigger on item"],
    "pgmb": ["push_inserts on item"],
    "mbus": ["post_new on item"],
}
"""The triggers, outside of its schema, by which an original system captures."""


def of_server(name):
    return pytest.param(name, marks=pytest.mark.hstore if name == "mbus" else ())


def all_there(connection):
    """Return the objects of the database without PostgreSQL's own objects."""
    query = """
        select 'schema', nspname::text from pg_namespace where nspname !~ '^pg_'
        union all select 'function', oid::regprocedure::text from pg_proc where oid >= 16384
        union all select 'relation', oid::regclass::text from pg_class where oid >= 16384 and relkind in ('r', 'v', 'S')
        union all select 'trigger', tgname || tgrelid::regclass from pg_trigger
        union all select 'extension', extname from pg_extension
        order by 1, 2
    """
    return connection.execute(query).fetchall()


def advised(refused, pattern):
    """Return the statements in an advice."""
    return [found for found in re.findall("`(.*?)`", str(refused.value)) if re.match(pattern, found)]


@pytest.fixture
def connection(bare_db, connect_to):
    return connect_to(bare_db)


@pytest.mark.parametrize("name", [of_server(name) for name in ORIGINALS])
def test_an_original_is_told_with_what_it_captures_and_goes_on(connection, name):
    connection.execute(ORIGINALS[name])
    before = all_there(connection)
    with pytest.raises(Refused, match=f"schema {name} is there and is not ours.*Do not rename it") as refused:
        schema.install(connection)
    assert all_there(connection) == before
    connection.execute(WRITE, [1])
    assert all(trigger in str(refused.value) for trigger in CAPTURING.get(name, []))


@pytest.mark.parametrize("name", ["revision", "pgmb"])
def test_ours_are_installed_beside_an_original_as_is_advised(connection, name):
    connection.execute(ORIGINALS[name])
    with pytest.raises(Refused) as refused:
        schema.install(connection)
    [command] = advised(refused, "airflow-pgchange install")
    without = command.replace("--without", "").split()[2:]
    assert name in without
    schema.install(connection, without=without)
    connection.execute(WRITE, [1])


@pytest.mark.parametrize("name", [of_server(name) for name in ORIGINALS])
def test_an_original_that_nobody_uses_goes_as_is_advised(connection, name):
    connection.execute(ORIGINALS[name])
    with pytest.raises(Refused) as refused:
        schema.install(connection)
    for statement in advised(refused, "drop trigger"):
        connection.execute(statement)
    connection.execute(f"drop schema {name} cascade")
    schema.install(connection, [name])
    assert name in versions.present(connection)


@pytest.mark.parametrize("name", [of_server(name) for name in CAPTURING])
def test_an_original_that_was_renamed_is_not_let_write_into_ours(connection, name):
    connection.execute(ORIGINALS[name])
    connection.execute(f"alter schema {name} rename to former")
    before = all_there(connection)
    with pytest.raises(Refused, match=f"would write into schema {name} of ours") as refused:
        schema.install(connection)
    assert all_there(connection) == before
    for statement in advised(refused, "drop trigger"):
        connection.execute(statement)
    schema.install(connection, [name])
    if name != "mbus":
        connection.execute(WRITE, [1])


def test_triggers_of_a_tube_that_is_gone_are_not_let_write_into_ours(connection):
    connection.execute(ORIGINALS["tube"])
    connection.execute("alter function tube.q_trigger() set schema public; drop schema tube cascade")
    with pytest.raises(
        Refused, match="would write into schema tube of ours.*item_q_after_insert_trigger on item"
    ):
        schema.install(connection, ["tube"])


def test_triggers_of_an_applications_own_that_use_a_schema_of_ours_hinder_nothing(connection):
    connection.execute("""
        create table public.item (id bigint primary key, revision int);
        create function public.tell() returns trigger language plpgsql as $$
        begin
            insert into pgmb.events (topic, payload) values ('item', to_jsonb(new));
            new.revision := 1;
            return null;
        end
        $$;
        create trigger tell after insert on public.item for each row execute function public.tell()
    """)
    schema.install(connection, ["pgmb"])
    connection.execute("select pgmb.push_table_mutations('public.item')")
    connection.execute(WRITE, [1])
    assert one(connection, "select count(*) from pgmb.events") == 2


@pytest.fixture
def captured_before(connection):
    """Our schemas, and triggers of a former original on a table. They came back with a restore, or our schemas were
    installed by psql."""

    def made(name):
        connection.execute(ORIGINALS[name])
        connection.execute(f"alter schema {name} rename to former")
        query = (
            "select tgrelid::regclass, tgname, pg_get_triggerdef(oid) from pg_trigger where not tgisinternal"
        )
        triggers = connection.execute(query).fetchall()
        for table, trigger, _ in triggers:
            connection.execute(f"drop trigger {trigger} on {table}")
        schema.install(connection, [name])
        for table, _, trigger in triggers:
            if table == "item":
                connection.execute(trigger)
        return connection

    return made


TWICE = {
    "pgmb": ("select pgmb.push_table_mutations('item')", "select count(*) from pgmb.events"),
    "revision": ("select revision.track('item', '{id}')", "select count(*) from revision.commit_queue"),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_table_that_an_original_captures_is_not_captured_twice(captured_before, name):
    capture, count = TWICE[name]
    connection = captured_before(name)
    with pytest.raises(psycopg.Error, match="each change would come twice") as refused:
        connection.execute(capture)
    connection.execute(refused.value.diag.message_hint.partition(": ")[2])
    connection.execute(capture)
    connection.execute(WRITE, [1])
    assert one(connection, count) == 1


@pytest.fixture
def admins(connection):
    """The roles that an original system created for this database, and that remain when its schema is dropped."""
    name = connection.info.dbname
    roles = [f"mbus_{name}_admin", f"mbus_{name}_post_q"]
    for role in roles:
        connection.execute(f"create role {role} nologin")
    connection.execute(f"create table public.item (id bigint); grant insert on public.item to {roles[1]}")
    yield roles
    connection.execute("drop table if exists public.item")
    for role in roles:
        connection.execute(f"drop role if exists {role}")


@pytest.mark.hstore
@pytest.mark.parametrize(
    "way", ["drop owned by", "comment on role", "airflow-pgchange install --without mbus"]
)
def test_roles_that_an_original_left_are_told_and_what_is_advised_helps(connection, admins, way):
    before = all_there(connection)
    with pytest.raises(Refused, match=f"role {admins[0]} is there and is not ours") as refused:
        schema.install(connection)
    assert all_there(connection) == before
    [statement] = advised(refused, way)
    if way.startswith("airflow"):
        schema.install(connection, without=["mbus"])
        return
    connection.execute(statement)
    schema.install(connection, ["mbus"])
    connection.execute("select mbus.create_queue('other', 2)")
    schema.uninstall(connection)
