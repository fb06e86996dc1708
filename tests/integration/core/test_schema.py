"""Installing, checking and removing the SQL."""

from __future__ import annotations

import asyncio
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from airflow_pgchange.admin import consumers, schema, upgrades, versions
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import (
    InvalidArgument,
    PermissionDenied,
    Refused,
    SchemaMissing,
    SchemaVersionMismatch,
)
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.extensions import EXTENSIONS
from airflow_pgchange.feeds.queries import ask, ask_all
from airflow_pgchange.messages import queues
from tests.schemas import possible
from tests.waiting import until, waits


def schemas(connection):
    names = [system.schema for system in versions.SYSTEMS]
    rows = connection.execute(
        "select nspname from pg_namespace where nspname = any (%s) order by 1", [names]
    ).fetchall()
    return {row[0] for row in rows}


def test_installing_twice_does_nothing(bare_db, connect_to):
    connection = connect_to(bare_db)
    first = schema.install(connection)
    held = [state for state in first if not state.left_out]
    assert [state.version for state in held] == [system.version for system in possible(connection)]
    assert all(state.intact for state in held)
    assert schema.install(connection) == first


def test_changes_of_a_schema_by_hand_are_reported(connect):
    connection = connect()
    connection.execute("update pubsub.installed set checksum = 'another'")
    assert [state.system for state in versions.installed(connection) if not state.intact] == ["pubsub"]


def test_a_schema_made_from_other_files_is_not_taken_for_this_packages(connect):
    connection = connect()
    connection.execute("update pubsub.installed set checksum = 'another'")
    for deed in (schema.install, upgrades.upgrade):
        with pytest.raises(
            SchemaVersionMismatch, match=r"schema pubsub .* other files.*airflow-pgchange uninstall"
        ):
            deed(connection)


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_the_second_of_two_concurrent_installs_finds_everything_installed(bare_db, connect_to, level):
    first, second, looking = connect_to(bare_db), connect_to(bare_db), connect_to(bare_db)
    second.execute(f"set default_transaction_isolation = '{level}'")
    with ThreadPoolExecutor() as pool:
        with first.transaction():
            found = schema.install(first, ["tube"])
            waiting = pool.submit(schema.install, second, ["tube"])
            until(looking, waits(second, "advisory", behind=first))
        assert waiting.result() == found


def test_a_transaction_that_could_not_see_what_others_install_is_told_so(bare_db, connect_to):
    connection = connect_to(bare_db, autocommit=False)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("select 1")
    for deed in (schema.install, upgrades.upgrade, schema.uninstall):
        with pytest.raises(Refused, match="read committed"):
            deed(connection)
    assert schemas(connection) == set()


def test_a_failed_installation_leaves_nothing_behind(bare_db, connect_to, monkeypatch):
    connection = connect_to(bare_db)
    monkeypatch.setattr(
        versions, "note_checksum", lambda connection, system: connection.execute("select 1 / 0")
    )
    with pytest.raises(psycopg.errors.DivisionByZero):
        schema.install(connection)
    assert schemas(connection) == set()


@pytest.fixture
def geometry(bare_db, connect_to):
    """A connection to a database in which another program has a schema with the name of one of ours."""
    connection = connect_to(bare_db)
    connection.execute(
        "create schema topology; create table topology.topology (id int);"
        "create table topology.installed (version text); insert into topology.installed values ('3.5')"
    )
    return connection


def of_others(connection):
    """Return the objects in that schema."""
    return connection.execute("select version from topology.installed").fetchall()


def test_a_schema_of_others_is_refused_before_anything_is_made(geometry):
    with pytest.raises(Refused, match=r"schema topology .* is not ours: .*--without topology"):
        schema.install(geometry)
    assert schemas(geometry) == {"topology"}


def test_an_empty_schema_by_one_of_our_names_is_not_taken_for_ours(bare_db, connect_to):
    connection = connect_to(bare_db)
    connection.execute("create schema pgmb")
    with pytest.raises(Refused, match="schema pgmb .* is not ours"):
        schema.install(connection, ["pgmb"])
    assert schemas(connection) == {"pgmb"}


def test_a_sealed_schema_of_others_is_refused_and_one_that_is_left_over_is_made_anew(bare_db, connect_to):
    connection = connect_to(bare_db)
    connection.execute("create schema tube_sealed")
    with pytest.raises(Refused, match="schema tube_sealed is there and is not ours"):
        schema.install(connection, ["tube"])
    connection.execute("drop schema tube_sealed")
    schema.install(connection, ["tube"])
    connection.execute("drop schema tube cascade")
    schema.install(connection, ["tube"])
    connection.execute("drop schema tube cascade")
    assert schema.uninstall(connection) == ["core"]
    left = "select nspname from pg_namespace where nspname ~ '_sealed$'"
    assert connection.execute(left).fetchall() == []


def test_a_sealed_schema_takes_the_place_of_no_schema_of_others_where_psql_loads_the_files(connection, role):
    stranger = role("stranger").name
    connection.execute(
        f"create schema a_sealed; create schema b_sealed authorization {stranger}; "
        "comment on schema b_sealed is 'pgchange: a schema of somebody else'"
    )
    for name in ("a", "b"):
        with pytest.raises(psycopg.errors.DuplicateSchema, match=f"{name}_sealed"):
            connection.execute("select pgchange.make_sealed(%s)", [name])


def test_the_others_are_used_beside_a_schema_of_others(geometry):
    held = [state.system for state in schema.install(geometry, without=["topology"]) if not state.left_out]
    assert held == [system.folder for system in possible(geometry) if system.folder != "topology"]
    assert versions.present(geometry) == held
    upgrades.upgrade(geometry)
    report = maintain(geometry, retention="30 days")
    assert (report.failed, report.attention) == ([], [])
    assert consumers.status(geometry) == []
    assert schema.uninstall(geometry) == held[::-1]
    assert schemas(geometry) == {"topology"}
    assert of_others(geometry) == [("3.5",)]


def test_systems_that_a_system_needs_are_installed_with_it(bare_db, connect_to):
    found = schema.install(connect_to(bare_db), ["pubsub"])
    assert [state.system for state in found] == ["core", "revision", "pubsub"]


def test_a_system_that_others_need_is_not_left_out(bare_db, connect_to):
    connection = connect_to(bare_db)
    with pytest.raises(InvalidArgument, match="revision cannot be left out, because pubsub needs it"):
        schema.install(connection, without=["revision"])
    assert schemas(connection) == set()


@pytest.fixture
def without_hstore(monkeypatch):
    """The server lacks something that queues need."""
    monkeypatch.setitem(EXTENSIONS, "mbus", "hstore_of_another_server")


def test_a_system_that_the_server_cannot_have_is_left_out_and_named(bare_db, connect_to, without_hstore):
    connection = connect_to(bare_db)
    found = schema.install(connection)
    assert [state.system for state in found if state.version == 0] == ["mbus"]
    [told] = [state.left_out for state in found if state.left_out]
    assert re.match("the server has no hstore_of_another_server: install postgresql-contrib", told)
    assert schema.install(connection) == found
    assert "mbus" not in versions.present(connection)


def test_a_system_that_was_requested_by_name_is_not_left_out(bare_db, connect_to, without_hstore):
    connection = connect_to(bare_db)
    with pytest.raises(Refused, match="mbus: the server has no hstore_of_another_server"):
        schema.install(connection, ["mbus", "tube"])
    assert schemas(connection) == set()


def test_who_misses_what_the_server_cannot_hold_is_not_told_to_install(bare_db, connect_to, without_hstore):
    schema.install(connect_to(bare_db), without=["mbus"])
    with feed_connect(bare_db) as connection:
        with pytest.raises(
            SchemaMissing, match="the server has no hstore_of_another_server: install postgresql-contrib"
        ):
            queues.new_iid(connection, "orders")
        with (
            connection.transaction(force_rollback=True),
            pytest.raises(SchemaMissing, match="postgresql-contrib"),
        ):
            queues.new_iid(connection, "orders")
    with (
        pytest.raises(SchemaMissing, match="the server has no hstore_of_another_server"),
        ConsumerTransaction(QueueFeed("orders"), bare_db),
    ):
        pass


def test_who_waits_for_what_the_server_cannot_hold_is_told_so(bare_db, connect_to, without_hstore):
    async def wait():
        connection = await connect_async(bare_db)
        async with connection:
            await ask_all(connection, [QueueFeed("orders").position()])

    with pytest.raises(SchemaMissing, match="the server has no hstore_of_another_server"):
        asyncio.run(wait())


def test_another_version_is_not_touched(connect):
    connection = connect()
    connection.execute("update revision.installed set version = 99")
    with pytest.raises(SchemaVersionMismatch, match="newer package"):
        schema.install(connection)


def test_an_unknown_system_is_named(bare_db, connect_to):
    with pytest.raises(InvalidArgument, match="'tubes'"):
        schema.install(connect_to(bare_db), ["tubes"])


def test_uninstalling_leaves_users_tables_writable(connect):
    connection = connect()
    connection.execute("create table ledger (id bigint primary key)")
    connection.execute("select revision.track('ledger')")
    schema.uninstall(connection)
    assert schemas(connection) == set()
    connection.execute("insert into ledger values (1)")


def test_a_system_that_another_needs_is_not_removed_alone(db, connect_to):
    connection = connect_to(db)
    with pytest.raises(InvalidArgument, match="pubsub needs revision: remove pubsub first"):
        schema.uninstall(connection, ["revision"])
    assert "revision" in schemas(connection)


def test_the_core_is_not_removed_alone(db, connect_to):
    connection = connect_to(db)
    users = {system.folder for system in possible(connection)} - {"core", "revision"}
    assert len(users) >= 4
    for kept in users:
        with pytest.raises(InvalidArgument, match=f"{kept} needs .*core"):
            schema.uninstall(connection, ["core", "revision", *(users - {kept})])
    assert "pgchange" in schemas(connection)


RUNNING = {
    "revision": "select revision.track('public.item'), revision.maintain_partitions()",
    "tube": "select tube.tube_ensure_exists('q', 2), tube.tube_table_ensure_attached('q', 'public.item', 0)",
    "pgmb": "select pgmb.push_table_mutations('public.item'), pgmb.maintain_events_table()",
    "mbus": "select mbus.create_queue('q', 2), mbus.create_queue('gone', 2), mbus.drop_queue('gone')",
}
"""Functions that create or drop objects of a schema in normal operation."""
THEIRS = {
    "table": "create table {}.my_archive as select 1 as n",
    "view": "create view {}.my_view as select 1 as n",
    "sequence": "create sequence {}.my_seq",
    "function": "create function {}.my_fn() returns int language sql return 1",
    "type": "create domain {}.my_type as int",
}


def test_objects_of_others_in_a_schema_are_never_dropped(connect):
    connection = connect()
    systems = possible(connection)
    connection.execute("create table public.item (id bigint primary key)")
    for made in filter(None, map(RUNNING.get, (each.folder for each in systems))):
        connection.execute(made)
    for system in systems:
        for made in THEIRS.values():
            connection.execute(made.format(system.schema))
        with pytest.raises(Refused, match=f"schema {system.schema} is used by others: ") as refused:
            schema.uninstall(connection)
        told = str(refused.value).split(": ")[1]
        kinds = [re.sub(r" \S*my_\w+\S*$", "", name) for name in told.split(", ")]
        assert sorted(kinds) == sorted(THEIRS), told
        for made in THEIRS.values():
            connection.execute(f"drop {made.split()[1]} {system.schema}.my_{made.split('my_')[1].split()[0]}")
    assert len(schemas(connection)) == len(systems)
    schema.uninstall(connection)
    assert schemas(connection) == set()


def test_a_role_that_may_not_remove_a_capture_uninstalls_nothing(db, role, connect_to):
    connection, owner, installer = connect_to(db), role("owner"), role("installer")
    connection.execute(f"create schema airline authorization {owner.name}")
    connection.execute("select revision.grant_owner(%s::regrole)", [owner.name])
    airline = connect_to(owner.conninfo)
    airline.execute("create table airline.ledger (id bigint primary key)")
    airline.execute("select revision.track('airline.ledger')")
    for name in schemas(connection):
        connection.execute(f"alter schema {name} owner to {installer.name}")
        connection.execute(f"grant all on all tables in schema {name} to {installer.name}")
        connection.execute(f"grant execute on all functions in schema {name} to {installer.name}")
    connection.execute(f"grant create on database {connection.info.dbname} to {installer.name}")
    with pytest.raises(PermissionDenied, match=r"revision\.untrack\('airline\.ledger'\)"):
        schema.uninstall(connect_to(installer.conninfo), ["revision", "pubsub"])
    assert len(schemas(connection)) == len(possible(connection))


def test_each_folder_loads_with_psql_in_one_transaction(bare_db, cluster, connect_to):
    connection = connect_to(bare_db)
    for system in possible(connection):
        files = [argument for path in versions.scripts(system) for argument in ("-f", str(path))]
        subprocess.run(
            ["/usr/bin/psql", "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-d", bare_db, *files],
            check=True,
            capture_output=True,
        )
    assert schemas(connection) == {system.schema for system in possible(connection)}
    assert {state.intact for state in versions.installed(connection)} == {None}


PUBLIC_OBJECTS = """
    select p.oid::regprocedure::text from pg_proc as p
    where p.pronamespace::regnamespace::text = any (%(schemas)s) and {function}
    union all
    select c.oid::regclass::text from pg_class as c
    where c.relnamespace::regnamespace::text = any (%(schemas)s) and c.relkind in ('r', 'v', 'p') and not c.relispartition
      and {table}
"""


def offenders(connect, function, table="false", *, sealed=False):
    names = [system.schema + ("_sealed" if sealed else "") for system in versions.SYSTEMS]
    query = PUBLIC_OBJECTS.format(function=function, table=table)
    return [row[0] for row in connect().execute(query, {"schemas": names}).fetchall()]


ROOT = Path(__file__).parents[3]
CALLED = re.compile(rf"\b({'|'.join(system.schema for system in versions.SYSTEMS)})\.(\w+) ?\(")


def documented():
    """The functions that the manuals' users call, and those that the documents and the example DAGs name."""
    pages = [
        ROOT / "README.md",
        ROOT / "tests/signatures.txt",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("dags/**/*.*"),
    ]
    texts = [page.read_text() for page in pages if page.suffix in (".md", ".txt", ".py", ".sh")]
    return {f"{schema}.{name}" for text in texts for schema, name in CALLED.findall(text)}


def test_every_table_and_every_function_that_users_call_has_a_comment(connect):
    called = documented()
    assert len(called) > 100
    internal = "coalesce(obj_description(p.oid, 'pg_proc'), 'Internal to schema') like 'Internal to schema%%'"
    undescribed = offenders(connect, internal, "obj_description(c.oid, 'pg_class') is null")
    assert [name for name in undescribed if "(" not in name or name.split("(")[0] in called] == []


def test_public_may_do_nothing(connect):
    assert offenders(connect, "has_function_privilege('public', p.oid, 'execute')") == []


MADE = """
create table public.item (id bigint primary key, n integer);
create function public.theirs() returns integer language sql as 'select 1';
select revision.track('public.item'), revision.maintain_partitions();
select tube.tube_ensure_exists('t', 2, 'n > 0'), tube.tube_table_ensure_attached('t', 'public.item', 0);
select pgmb.push_table_mutations('public.item'), pgmb.maintain_events_table();
"""
QUEUES = """
select mbus.create_queue('q', 2), mbus.create_queue('r', 2), mbus.create_view('q'), mbus.create_trigger('q', 'r')
"""
OPEN_TO = """
select p.oid::regprocedure::text from pg_proc as p
where p.pronamespace::regnamespace::text = any (%(schemas)s) and has_function_privilege(%(who)s, p.oid, 'execute')
  and not exists (select from pg_depend as d where d.objid = p.oid and d.deptype = 'e')
union all
select c.oid::regclass::text from pg_class as c
where c.relnamespace::regnamespace::text = any (%(schemas)s) and c.relkind in ('r', 'v', 'p', 'S')
  and case c.relkind when 'S' then has_sequence_privilege(%(who)s, c.oid, 'usage')
                     else has_table_privilege(%(who)s, c.oid, 'select, insert') end
order by 1
"""


def test_default_privileges_open_nothing_of_ours_to_anybody(bare_db, connect_to, role):
    connection, who = connect_to(bare_db), role("curious").name
    for kind in ("functions", "tables", "sequences", "types", "schemas"):
        connection.execute(f"alter default privileges grant all on {kind} to {who}")
    schema.install(connection)
    for name in schemas(connection):
        assert not ask(connection, f"select has_schema_privilege('{who}', '{name}', 'usage')"), name
    connection.execute(MADE)
    if "mbus" in schemas(connection):
        connection.execute(QUEUES)
    found = connection.execute(OPEN_TO, {"who": who, "schemas": [*schemas(connection), "public"]}).fetchall()
    connection.execute(f"drop owned by {who}")
    assert found == [("item",), ("theirs()",)]


@pytest.mark.hstore
def test_a_function_that_is_written_anew_keeps_who_may_call_it(connection, role):
    who = role("poster").name
    connection.execute("select mbus.create_queue('q', 2)")
    function = ask(connection, "select 'mbus.post_q'::regproc::oid::regprocedure::text")
    connection.execute(f"grant execute on function {function} to {who}")
    connection.execute("select mbus.create_consumer('other', 'q')")
    assert ask(connection, f"select has_function_privilege('{who}', '{function}', 'execute')")


def test_every_function_that_runs_as_its_owner_has_a_pinned_search_path(connect):
    path = "s like 'search_path=pg_catalog%%' and s like '%%pg_temp'"
    pinned = f"exists (select from unnest(p.proconfig) as s where {path})"
    assert offenders(connect, f"p.prosecdef and not {pinned}") == []
    assert offenders(connect, f"p.prosecdef and not {pinned}", sealed=True) == []


def test_a_schema_leaves_the_search_path_of_its_installer_as_it_was(bare_db, connect_to):
    connection = connect_to(bare_db)
    with connection.transaction():
        connection.execute("create schema mine; set search_path = mine, public")
        schema.install(connection)
        assert connection.execute("show search_path").fetchone() == ("mine, public",)


def test_a_role_is_not_declared_with_a_function_that_is_not_there(connection):
    with pytest.raises(psycopg.errors.UndefinedFunction, match="schema tube has no function clam"):
        connection.execute(
            "select pgchange.add_role('tube', 'reader', told => '', functions => 'claim clam')"
        )


def test_a_function_of_a_schema_that_is_closed_keeps_its_own_search_path_and_else_gets_that_of_the_load(
    bare_db, connect_to
):
    connection = connect_to(bare_db)
    schema.install(connection, ["core"])
    with connection.transaction():
        connection.execute(
            """
            create schema own;
            set local pgchange.path_before = 'public';
            set local search_path = pg_catalog, own, pg_temp;
            create function own.a() returns int language sql as 'select 1';
            create function own.b() returns int language sql set search_path = pg_catalog as 'select 1';
            create function own.c() returns int language sql as 'select 1';
            select pgchange.close_schema('own', unpinned => 'c')
            """
        )
    paths = connection.execute(
        "select proname, proconfig from pg_proc where pronamespace = 'own'::regnamespace order by 1"
    ).fetchall()
    assert paths == [
        ("a", ["search_path=pg_catalog, own, pg_temp"]),
        ("b", ["search_path=pg_catalog"]),
        ("c", None),
    ]


def test_a_given_function_that_names_everything_with_its_schema_gets_no_search_path(connect):
    paths = connect().execute(
        "select p.proconfig from pgchange.given as g join pg_proc as p on p.oid = to_regprocedure(g.signature) "
        "join pgchange.offered as o on o.name = p.proname where o.as_owner is false"
    )
    assert {path for (path,) in paths} == {None}


NEVER_CHANGED = "revision.commit_queue"
"""Tables that are only inserted into and truncated, with their partitions. They need no replica identity."""


def test_every_table_that_we_change_can_be_published(connect):
    """Under a publication for all tables PostgreSQL refuses updates and deletes of a table without an identity."""
    connection = connect()
    connection.execute("create publication everything for all tables")
    connection.execute("select tube.tube_ensure_exists('q')")
    connection.execute("select revision.maintain_partitions(); select pgmb.maintain_events_table()")
    if "mbus" in schemas(connection):
        connection.execute("select mbus.create_queue('q', 2)")
    names = [system.schema for system in versions.SYSTEMS]
    rows = connection.execute(
        """
        select c.oid::regclass::text, coalesce(i.inhparent, c.oid)::regclass::text = %s,
               case c.relreplident
                   when 'd' then exists (select from pg_index as k where k.indrelid = c.oid and k.indisprimary)
                   when 'i' then exists (select from pg_index as k where k.indrelid = c.oid and k.indisreplident)
                   else c.relreplident = 'f' end
        from pg_class as c
        left join pg_inherits as i on i.inhrelid = c.oid
        where c.relkind = 'r' and c.relpersistence = 'p'
          and (c.relnamespace::regnamespace::text = any (%s) or c.oid = 'q'::regclass)
        """,
        [NEVER_CHANGED, names],
    ).fetchall()
    assert len(rows) > 40
    assert [table for table, never_changed, usable in rows if not usable and not never_changed] == []


def test_a_published_database_can_be_installed_upgraded_and_removed(bare_db, connect_to):
    connection = connect_to(bare_db)
    connection.execute("create publication everything for all tables")
    schema.install(connection)
    upgrades.upgrade(connection)
    assert all(state.intact for state in versions.installed(connection))
    schema.uninstall(connection)
    assert schemas(connection) == set()


def test_a_dump_without_comments_can_be_uninstalled_where_it_was_restored(db, connect):
    connection = connect()
    for (name,) in connection.execute(
        "select oid::regprocedure::text from pg_proc where pronamespace = 'topology'::regnamespace and prokind = 'f'"
    ).fetchall():
        connection.execute(f"comment on function {name} is null")
    connection.execute("comment on table topology.installed is null")
    assert schema.uninstall(connection, ["topology"]) == ["topology"]
