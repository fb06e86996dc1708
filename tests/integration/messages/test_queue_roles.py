"""The rights of roles on queues, tried as the roles themselves over real connections."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import consumers, dead_letters
from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.feeds import ConsumerTransaction, QueueFeed
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.draining import drain as drain_feed
from airflow_pgchange.messages import Saga, Step, create_saga_queues
from tests.queues import consumer, drain, make, post, there

pytestmark = pytest.mark.hstore

TEMPORARY = "select mbus.create_temporary_consumer('q')"
DENIED = "Access denied"
POST = (
    "data public.hstore, headers public.hstore, properties public.hstore, delayed_until timestamp without time zone, "
    "expires timestamp without time zone, iid text"
)
"""The arguments of a function that posts."""


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


def test_the_current_role_counts_and_not_the_login_role(owner, role, connect_to):
    who, nobody = role("user"), role("nobody")
    owner.execute(f"grant mbus_{owner.info.dbname}_post_q, {nobody.name} to {who.name}")
    session = connect_to(who.conninfo)
    session.execute("select mbus.post_q('n=>1')")
    session.execute(f"set role {nobody.name}")
    with pytest.raises(psycopg.Error, match=DENIED):
        session.execute("select mbus.post_q('n=>2')")
    owner.execute(f"set role {nobody.name}")
    with pytest.raises(psycopg.Error, match=DENIED):
        drain(owner)
    owner.execute("reset role")
    assert drain(owner) == ["1"]


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
    connection.execute(f"grant execute on function mbus.can_post to {who.name}")
    connection.execute("create function public.post_q() returns void language sql as ''")
    assert session.execute("select mbus.can_post('q')").fetchone() == (False,), "it is in another schema"
    connection.execute(
        f"grant execute on function mbus.post_q, mbus.post, mbus.get_iid, mbus.take to {who.name}"
    )
    session.execute("select mbus.post_q('n=>1'), mbus.post('q', 'n=>2', iid => mbus.get_iid('q'))")
    assert session.execute("select mbus.can_post('q')").fetchone() == (True,)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        session.execute("select mbus.consume_q_by_default()")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=DENIED):
        session.execute("select mbus.take('q.1')")
    assert drain(connection) == ["1", "2"]


def test_an_error_about_a_missing_right_names_roles_only_if_there_are_any(connect, role, connect_to):
    connection, who = connect(), role("user")
    make(connection)
    owner = connection.info.user
    connection.execute(f"grant usage on schema mbus to {who.name}")
    connection.execute(f"grant execute on function mbus.get_iid, mbus.create_queue to {who.name}")
    session = connect_to(who.conninfo)
    hints = {}
    for call in ("get_iid('q')", "create_queue('new', 2)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=DENIED) as refused:
            session.execute(f"select mbus.{call}")
        hints[call] = refused.value.diag.message_hint
    assert hints == {
        "get_iid('q')": f"let {owner} run: grant execute on function mbus.post_q({POST}) to {who.name}",
        "create_queue('new', 2)": f"let {owner} run: grant mbus_{connection.info.dbname}_admin to {who.name}",
    }


def test_nobody_makes_a_dead_letter_of_the_message_of_a_queue_that_is_not_its_own(owner, role, connect_to):
    who = role("user")
    owner.execute(f"grant mbus_{owner.info.dbname}_post_q to {who.name}")
    session = connect_to(who.conninfo)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=DENIED):
        session.execute("select mbus.post_dmq('n=>1', iid => 'r.1')")
    assert dead_letters.letters(owner) == []


def test_a_temporary_consumer_does_not_read_past_the_selectors_of_its_maker(owner, role, connect_to):
    for name, n in (("a", 1), ("b", 2)):
        consumer(owner, name, f"(t.data->'n') = '{n}' -- a comment")
    for n in (1, 2, 3):
        post(owner, n)
    for rights, seen in (
        (["consume_q_by_a"], ["1"]),
        (["consume_q_by_a", "consume_q_by_b"], ["1", "2"]),
        (["consume_q_by_a", "consume_q_by_other"], ["1", "2", "3"]),
        (["admin_q"], ["1", "2", "3"]),
    ):
        who = role("user")
        for right in rights:
            owner.execute(f"grant mbus_{owner.info.dbname}_{right} to {who.name}")
        session = connect_to(who.conninfo)
        names = [session.execute(TEMPORARY).fetchone()[0] for _ in range(2)]
        assert [drain(session, name) for name in names] == [seen, seen], rights


def test_a_temporary_consumer_is_bound_without_roles_too(connect, role, connect_to):
    connection, who = connect(), role("user")
    make(connection)
    consumer(connection, "a", "(t.data->'n') = '1'")
    connection.execute(f"grant usage on schema mbus to {who.name}")
    can = "execute on function mbus.consume_q_by_a, mbus.create_temporary_consumer"
    connection.execute(f"grant {can} to {who.name}")
    session = connect_to(who.conninfo)
    (name,) = session.execute(TEMPORARY).fetchone()
    post(connection, 1)
    post(connection, 2)
    assert drain(session, name) == ["1"]
    connection.execute(f"revoke execute on function mbus.consume_q_by_a from {who.name}")
    with pytest.raises(psycopg.Error, match=DENIED):
        session.execute(TEMPORARY)


def test_a_role_that_may_consume_has_temporary_consumers(owner, role, connect_to):
    who, other = role("user"), role("user")
    right = f"mbus_{owner.info.dbname}_consume_q_by_other"
    owner.execute(f"grant {right} to {who.name}, {other.name}")
    session = connect_to(who.conninfo)
    name = session.execute("select mbus.create_temporary_consumer('q')").fetchone()[0]
    post(owner, 1)
    assert drain(session, name) == ["1"]
    post(owner, 2)
    with pytest.raises(psycopg.Error, match="permission denied"):
        drain(connect_to(other.conninfo), name)
    owner.execute(f"revoke {right} from {who.name}")
    with pytest.raises(psycopg.Error, match=DENIED):
        drain(session, name)


def test_a_role_with_execute_on_a_queues_functions_has_temporary_consumers(connect, role, connect_to):
    connection = connect()
    make(connection)
    who, other = role("user"), role("user")
    for one in (who, other):
        connection.execute(f"grant usage on schema mbus to {one.name}")
        connection.execute(
            f"grant execute on function mbus.consume_q_by_default, mbus.create_temporary_consumer to {one.name}"
        )
    session = connect_to(who.conninfo)
    name = session.execute("select mbus.create_temporary_consumer('q')").fetchone()[0]
    post(connection, 1)
    assert drain(session, name) == ["1"]
    with pytest.raises(psycopg.Error, match="permission denied"):
        drain(connect_to(other.conninfo), name)


def test_an_admin_of_a_queue_clears_it_and_sees_how_far_its_consumers_are(owner, role, connect_to):
    who = role("user")
    owner.execute(f"grant mbus_{owner.info.dbname}_admin_q to {who.name}")
    session = connect_to(who.conninfo)
    post(owner, 1)
    post(owner, 2, expires="-1 hour")
    session.execute("select mbus.clear_queue_q()")
    assert there(owner) == ["1"]
    assert [(row["consumer"], row["ready"]) for row in consumers.status(session)] == [
        ("queue:q/default", 1), ("queue:q/other", 1),
    ]  # fmt: skip


def test_an_admin_of_all_queues_makes_those_of_a_saga(owner, role, connect_to):
    who = role("user")
    owner.execute(f"grant mbus_{owner.info.dbname}_admin to {who.name}")
    saga = Saga("s", (Step("a", "q", "undo"),))
    create_saga_queues(connect_to(who.conninfo), saga)
    assert owner.execute("select count(*) from mbus.queue").fetchone() == (6,)


def test_a_consumers_role_works_its_feed_and_keeps_its_letters(owner, role, connect_to):
    who, other = role("user"), role("user")
    for one, name in ((who, "default"), (other, "other")):
        owner.execute(f"grant mbus_{owner.info.dbname}_consume_q_by_{name} to {one.name}")
        owner.execute("select mbus.grant_admin(%s::regrole)", [one.name])
    post(owner, 1)

    def fail(transaction, batch):
        raise ValueError("poison")

    drained = drain_feed(Plan(QueueFeed("q"), who.conninfo, max_attempts=1, on_give_up="dead_letter"), fail)
    assert dead_letters.letters(connect_to(other.conninfo)) == []
    session = connect_to(who.conninfo)
    assert tuple(letter.id for letter in dead_letters.letters(session)) == drained.letters
    dead_letters.redrive(session, ids=list(drained.letters))
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
