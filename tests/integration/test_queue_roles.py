"""Every function as every role, over real connections."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange import letters
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.draining import drain as drain_feed
from airflow_pgchange.feeds.errors import PermissionDenied
from tests.queues import consumer, drain, make, post, there

DENIED = "Access denied"

POST = {
    "mbus.post_q('n=>1')",
    "mbus.postn_q(array['n=>1']::hstore[])",
    "mbus.post('q', 'n=>1')",
    "mbus.get_iid('q')",
}
CONSUME = {
    "mbus.consume_q_by_default()",
    "mbus.consumen_q_by_default(3)",
    "mbus.take_from_q_by_default('q.1')",
    "mbus.consume('q')",
    "mbus.feed_lag('q', 'default', 1)",
    "mbus.feed_in_work('q', 'default', '{}')",
    "mbus.feed_changes('q', 'default', '{}', 0, 1)",
}
LOOK = {
    "mbus.take('q.1')",
    "mbus.peek('q.1')",
    "mbus.peek_q()",
    "mbus.is_msg_exists('q.1')",
    "mbus.estimated_messages('q')",
    "mbus.create_temporary_consumer('q')",
    "mbus.feed_point('q')",
    "mbus.saga_turn('q.1')",
}
OTHER = {"mbus.consume_q_by_other()", "mbus.consumen_q_by_other(3)", "mbus.consume('q', 'other')"}
KEEP = {"mbus.clear_queue_q()", "mbus.create_consumer('new', 'q')", "mbus.drop_consumer('other', 'q')"}
MAKE = {
    "mbus.create_queue('new', 4, true)",
    "mbus.drop_queue('q')",
    "mbus.create_trigger('q', 'r')",
}
OWNER = {
    "mbus.create_consumer('new', 'q', 'true')",
    "mbus.create_temporary_consumer('q', 'true')",
    "mbus.create_trigger('q', 'r', 'true')",
    "mbus.create_view('q')",
    "mbus.create_run_function('q')",
}
DMQ = {"mbus.post_dmq('n=>1')"}

ALLOWED = {
    "nobody": set(),
    "post_q": POST | DMQ,
    "consume_q_by_default": CONSUME | LOOK | DMQ,
    "consume_q_by_other": OTHER | LOOK | DMQ,
    "admin_q": POST | CONSUME | OTHER | LOOK | KEEP | DMQ,
    "admin": POST | CONSUME | OTHER | LOOK | KEEP | MAKE | DMQ,
}
EVERY = POST | CONSUME | OTHER | LOOK | KEEP | MAKE | OWNER | DMQ


@pytest.fixture
def owner(connect):
    connection = connect()
    make(connection, "q", "r", roles=True)
    consumer(connection, "other")
    yield connection
    for queue in ("q", "r"):
        connection.execute("select mbus.drop_queue(%s)", [queue])


@pytest.mark.parametrize("right", ALLOWED)
def test_a_role_may_do_what_it_was_granted_and_nothing_else(owner, role, connect_to, right):
    who = role("user")
    if right != "nobody":
        owner.execute(f"grant mbus_{owner.info.dbname}_{right} to {who.name}")
    session = connect_to(who.conninfo, autocommit=False)
    for call in sorted(EVERY):
        post(owner, 1)
        if call in ALLOWED[right]:
            session.execute(f"select * from {call}")
        else:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=DENIED):
                session.execute(f"select * from {call}")
        session.rollback()


@pytest.mark.parametrize("right", ALLOWED)
def test_no_role_reaches_the_tables_behind_the_functions(owner, role, connect_to, right):
    who = role("user")
    if right != "nobody":
        owner.execute(f"grant mbus_{owner.info.dbname}_{right} to {who.name}")
    session = connect_to(who.conninfo)
    post(owner, 1)
    tables = ['"log$q"', "dmq", "tempq", "queue", "consumer", "position", "apart", "receipt"]
    statements = [f"delete from mbus.{table}" for table in tables]
    statements += [f"select * from mbus.{relation}" for relation in [*tables, '"qt$q"', '"all$q"']]
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            session.execute(statement)
    for call in [
        "mbus.claim((select null::mbus.queue), 1, 1)",
        'mbus."receive$1"(1)',
        "mbus.make_role('mine')",
    ]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            session.execute(f"select {call}")
    assert there(owner) == ["1"]


def test_can_post_and_can_consume_tell_what_a_role_may(owner, role, connect_to):
    who = role("user")
    session = connect_to(who.conninfo)
    query = "select mbus.can_post('q'), mbus.can_consume('q'), mbus.can_consume('q', 'other'), mbus.can_post('nowhere')"
    assert session.execute(query).fetchone() == (False, False, False, False)
    owner.execute(
        f"grant mbus_{owner.info.dbname}_post_q, mbus_{owner.info.dbname}_consume_q_by_other to {who.name}"
    )
    assert session.execute(query).fetchone() == (True, False, True, False)
    assert owner.execute(query).fetchone() == (True, True, True, False)


def test_an_admin_hands_on_the_roles_of_queues(owner, role, connect_to):
    admin, user = role("admin"), role("user")
    database = owner.info.dbname
    owner.execute(f"grant mbus_{database}_admin to {admin.name}")
    connect_to(admin.conninfo).execute(f"grant mbus_{database}_post_q to {user.name}")
    connect_to(user.conninfo).execute("select mbus.post_q('n=>1')")
    assert drain(owner) == ["1"]


def test_set_role_does_not_lend_a_right(owner, role, connect_to):
    who, other = role("user"), role("other")
    owner.execute(f"grant mbus_{owner.info.dbname}_post_q to {other.name}")
    session = connect_to(who.conninfo)
    with pytest.raises(psycopg.Error, match=DENIED):
        session.execute("select mbus.post_q('n=>1')")


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


def test_a_role_name_that_passes_63_bytes_is_refused(connect):
    connection = connect()
    make(connection, "q" * 15)
    with pytest.raises(psycopg.Error, match="is too long"):
        consumer(connection, "c" * 32, queue="q" * 15)
    with pytest.raises(psycopg.Error, match="is too long"):
        make(connection, "q" * 32)


def test_an_owner_who_may_not_make_roles_has_queues_without_them(bare_db, cluster, connect_to, role):
    from airflow_pgchange import schema

    who = role("owner")
    admin = connect_to(bare_db)
    admin.execute("create extension hstore")
    admin.execute(f"grant create on database {admin.info.dbname} to {who.name}")
    connection = connect_to(cluster.conninfo(admin.info.dbname, who.name))
    schema.install(connection, ["dead_letters", "mbus"])
    make(connection)
    post(connection, 1)
    assert drain(connection) == ["1"]
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not make roles"):
        make(connection, "r", roles=True)
    schema.uninstall(connection, ["mbus", "dead_letters"])


def test_a_view_lends_the_rights_of_its_queue(owner, role, connect_to):
    who = role("user")
    owner.execute("select mbus.create_view('q')")
    session = connect_to(who.conninfo)
    for statement in ["select * from public.q_q", "insert into public.q_q (data) values ('n=>1')"]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            session.execute(statement)
    owner.execute(f"grant select, insert on public.q_q to {who.name}")
    session.execute("insert into public.q_q (data) values ('n=>1')")
    assert session.execute("select data -> 'n' from public.q_q").fetchall() == [("1",)]


def test_a_queue_without_roles_follows_execute_on_its_functions(connect, role, connect_to):
    connection = connect()
    make(connection)
    who = role("user")
    session = connect_to(who.conninfo)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        session.execute("select mbus.post_q('n=>1')")
    connection.execute(f"grant usage on schema mbus to {who.name}")
    connection.execute(
        f"grant execute on function mbus.post_q, mbus.post, mbus.get_iid, mbus.take, mbus.can_post to {who.name}"
    )
    session.execute("select mbus.post_q('n=>1'), mbus.post('q', 'n=>2', iid => mbus.get_iid('q'))")
    assert session.execute("select mbus.can_post('q')").fetchone() == (True,)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        session.execute("select mbus.consume_q_by_default()")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=DENIED):
        session.execute("select mbus.take('q.1')")
    assert drain(connection) == ["1", "2"]


def test_a_consumers_role_works_its_feed_and_keeps_its_letters(owner, role, connect_to):
    who, other = role("user"), role("user")
    for one, name in ((who, "default"), (other, "other")):
        owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_{name} to {one.name}")
        owner.execute("select mbus.grant_keeper(%s::regrole)", [one.name])
    post(owner, 1)

    def fail(transaction, batch):
        raise ValueError("poison")

    drained = drain_feed(Plan(QueueFeed("q"), who.conninfo, max_attempts=1, on_give_up="dead_letter"), fail)
    assert letters.listed(connect_to(other.conninfo)) == []
    session = connect_to(who.conninfo)
    assert tuple(letter.id for letter in letters.listed(session)) == drained.letters
    letters.again(session, ids=list(drained.letters))
    with ConsumerTransaction(QueueFeed("q"), who.conninfo) as transaction:
        assert transaction.claim(10).count == 1
        transaction.ack()


def test_a_role_without_the_right_has_no_feed(owner, role):
    post(owner, 1)
    with (
        pytest.raises(PermissionDenied, match=DENIED),
        ConsumerTransaction(QueueFeed("q"), role("user").conninfo) as transaction,
    ):
        transaction.claim(10)
