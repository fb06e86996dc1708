"""Roles are created and dropped with queues. Roles belong to the cluster, so another database may have a role of the same
name."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_pgchange.admin import schema
from tests.conftest import TEMPLATE
from tests.queues import consumer, drain, make, one, post

pytestmark = pytest.mark.hstore


@pytest.fixture
def neighbour(db, cluster, connect_to):
    """A second database, called x_post if the first is called x.

    In x_post the role that administers all queues would have the same name as the role in x that may post to a queue
    ``admin``.
    """
    name = conninfo_to_dict(db)["dbname"] + "_post"
    connection = connect_to(cluster.conninfo())
    connection.execute(f"create database {name} template {TEMPLATE} strategy file_copy")
    yield cluster.conninfo(name)
    connection.execute(f"drop database {name} with (force)")


def queue_names(connection):
    return {row[0] for row in connection.execute("select qname from mbus.queue")}


def test_roles_come_and_go_with_their_queues_and_consumers(connect):
    connection = connect()
    name = connection.info.dbname
    query = "select substr(rolname, length(%s) + 1)::text from pg_roles where rolname like %s order by 1"

    def roles():
        prefix = f"mbus_{name}_"
        return [row[0] for row in connection.execute(query, [prefix, prefix + "%"])]

    make(connection, "q", "q_more")
    consumer(connection, "c")
    assert roles() == [
        "admin", "admin_q", "admin_q_more", "consume_q_by_c", "consume_q_by_default", "consume_q_more_by_default",
        "post_q", "post_q_more",
    ]  # fmt: skip
    connection.execute("select mbus.drop_consumer('c', 'q')")
    connection.execute("select mbus.drop_queue('q')")
    assert roles() == ["admin", "admin_q_more", "consume_q_more_by_default", "post_q_more"]
    connection.execute(f"drop role mbus_{name}_post_q_more")
    connection.execute("select mbus.restore_roles()")
    assert roles() == ["admin", "admin_q_more", "consume_q_more_by_default", "post_q_more"]
    connection.execute("select mbus.drop_queue('q_more')")


@pytest.fixture
def other_names(connection, cluster):
    """A function that creates login roles with exactly these names. They are dropped at the end."""
    made = []

    def make_roles(*names):
        for name in names:
            connection.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
            made.append(name)

    yield make_roles
    connection.execute("select mbus.clear_tempq()")
    for name in made:
        connection.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(sql.Identifier(name)))


@pytest.mark.parametrize("name", ["Reader", "12345", "a reader"])
def test_a_role_of_any_name_consumes_by_its_temporary_consumer(connection, connect_to, db, other_names, name):
    """A role with the same name in lower case gets no right."""
    other_names(*{name, name.lower()})
    make(connection)
    connection.execute(
        sql.SQL(
            "grant usage on schema mbus to {0}; grant execute on function mbus.consume_q_by_default(), "
            "mbus.consume(text, text), mbus.create_temporary_consumer(text, text) to {0}"
        ).format(sql.Identifier(name))
    )
    session = connect_to(make_conninfo(db, user=name))
    cname = one(session, "select mbus.create_temporary_consumer('q')")
    post(connection, 1)
    assert one(session, "select data -> 'n' from mbus.consume('q', %s)", cname) == "1"
    if name != name.lower():
        called = f"mbus.consume_q_by_{cname}()"
        assert (
            one(connection, "select has_function_privilege(%s, %s, 'execute')", name.lower(), called) is False
        )
    session.close()


def test_a_role_name_that_passes_63_bytes_is_refused(connect):
    connection = connect()
    make(connection, "q" * 15)
    with pytest.raises(psycopg.Error, match="is too long"):
        consumer(connection, "c" * 32, queue="q" * 15)
    with pytest.raises(psycopg.Error, match="is too long"):
        make(connection, "q" * 32)


def test_an_owner_who_may_not_make_roles_has_queues_without_them(bare_db, cluster, connect_to, role):
    from airflow_pgchange.admin import schema

    who = role("owner")
    admin = connect_to(bare_db)
    admin.execute("create extension hstore")
    admin.execute(f"grant create on database {admin.info.dbname} to {who.name}")
    connection = connect_to(cluster.conninfo(admin.info.dbname, who.name))
    schema.install(connection, ["mbus"])
    make(connection)
    post(connection, 1)
    assert drain(connection) == ["1"]
    longest = "x" * 32
    make(connection, longest)
    name = one(connection, "select mbus.create_temporary_consumer(%s)", longest)
    assert drain(connection, name, longest) == []
    for needs_roles in [
        "mbus.create_queue('r', 4, true)",
        "mbus.create_queue('q', 4, true)",
        "mbus.restore_roles()",
    ]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not create roles"):
            connection.execute(f"select {needs_roles}")
    schema.uninstall(connection, ["mbus", "core"])


def test_a_queue_whose_role_is_another_databases_is_refused(connect, connect_to, neighbour):
    here, there = connect(), connect_to(neighbour)
    make(there, "q")
    taken = f"role mbus_{there.info.dbname}_admin already exists"
    with pytest.raises(psycopg.errors.DuplicateObject, match=taken) as refused:
        make(here, "admin")
    assert f"It is: mbus admin in database {there.info.dbname}" in refused.value.diag.message_detail
    make(here, "other")
    assert queue_names(here) == {"other"}
    post(there, 1)
    assert drain(there) == ["1"]


def test_a_database_whose_role_is_another_queues_is_refused(connect, connect_to, neighbour):
    here, there = connect(), connect_to(neighbour)
    make(here, "admin")
    with pytest.raises(psycopg.errors.DuplicateObject, match="already exists and belongs to another system"):
        make(there, "q", roles=True)
    assert queue_names(there) == set()


def test_a_role_of_another_database_gives_no_right(connect, connect_to, neighbour, role):
    here, there = connect(), connect_to(neighbour)
    make(here, "admin")
    who = role("user")
    here.execute(f"grant mbus_{there.info.dbname}_admin to {who.name}")
    there.execute("select mbus.open_door()")
    session = connect_to(make_conninfo(who.conninfo, dbname=there.info.dbname))
    with pytest.raises(psycopg.Error, match="Access denied"):
        session.execute("select mbus.create_queue('q', 4)")


def test_taking_the_queues_out_of_a_database_leaves_the_roles_of_another(connect, connect_to, neighbour):
    here, there = connect(), connect_to(neighbour)
    make(here, "admin")
    schema.uninstall(there, ["mbus"])
    assert one(here, "select mbus.role_of('post', 'admin') is not null")


def test_a_role_that_nobody_says_whose_it_is_is_refused_until_somebody_does(connect):
    connection = connect()
    connection.execute(f"create role mbus_{connection.info.dbname}_post_q")
    with pytest.raises(psycopg.errors.DuplicateObject, match="belongs to another system") as refused:
        make(connection)
    assert "no comment" in refused.value.diag.message_detail
    connection.execute(refused.value.diag.message_hint.partition("is missing: ")[2])
    make(connection)
    connection.execute("select mbus.drop_queue('q')")
    assert one(connection, f"select to_regrole('mbus_{connection.info.dbname}_post_q') is null")
