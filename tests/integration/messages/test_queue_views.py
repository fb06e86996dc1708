"""Views that receive and post: the roles that may use them, even if the view is replaced or renamed."""

from __future__ import annotations

import psycopg
import pytest

from tests.queues import drain, post, there

pytestmark = pytest.mark.hstore


@pytest.fixture
def receivers(owner):
    """Return calls of the functions behind the views."""

    def found():
        query = (
            "select oid::regproc::text || '(current_user)' from pg_proc "
            "where pronamespace = 'mbus_sealed'::regnamespace and proname ~ '^seen'"
        )
        return [name for (name,) in owner.execute(query).fetchall()]

    return found


@pytest.fixture
def shop(owner, role, connect_to):
    """A session of the owner of schema shop. It may post to q but not consume. shop.pay_in is a view of q."""
    who = role("shop")
    owner.execute(f"create schema shop authorization {who.name}")
    owner.execute(f"grant mbus_{owner.info.dbname}_post_q to {who.name}")
    owner.execute("select mbus.create_view('q', sname => 'shop', viewname => 'pay_in')")
    post(owner, 1)
    return connect_to(who.conninfo)


SEALED = "permission denied for schema mbus_sealed"
THEIRS = {
    "a table": "drop view shop.pay_in; create table shop.pay_in ()",
    "a view": "drop view shop.pay_in; create view shop.pay_in as select",
    "a view of another name": "create view shop.mine as select * from {}",
    "a view in its place": "drop view shop.pay_in; create view shop.pay_in as select * from {}",
    "a materialized view": "create materialized view shop.mine as select * from {} with no data",
    "a rule": "create table shop.mine (); create rule seen as on insert to shop.mine do also select * from {}",
    "a function": "create function shop.mine() returns bigint begin atomic select count(*) from {}; end",
}


def test_a_role_that_replaces_a_view_receives_nothing(shop, owner, receivers):
    (receiver,) = receivers()
    for kind, made in THEIRS.items():
        with (
            shop.transaction(force_rollback=True),
            pytest.raises(psycopg.errors.InsufficientPrivilege, match=SEALED),
            shop.transaction(),
        ):
            shop.execute(made.format(receiver))
            shop.execute(f"select * from {receiver}")
        assert there(owner) == ["1"], kind
    assert drain(owner) == ["1"]


def test_a_view_receives_for_who_may_select_from_it_and_under_another_name(
    owner, role, connect_to, receivers
):
    who, stranger = role("user"), role("stranger")
    owner.execute("create schema shop; select mbus.create_view('q')")
    owner.execute("alter view public.q_q rename to inbox; alter view public.inbox set schema shop")
    owner.execute(
        f"grant usage on schema shop to {who.name}, {stranger.name}; grant select, insert on shop.inbox to {who.name}"
    )
    session = connect_to(who.conninfo)
    session.execute("insert into shop.inbox (data) values ('n=>1')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=SEALED):
        connect_to(stranger.conninfo).execute(f"select * from {receivers()[0]}")
    assert session.execute("select data -> 'n' from shop.inbox").fetchall() == [("1",)]


def test_another_view_of_a_name_that_was_given_up_is_another(owner, role, connect_to):
    who = role("user")
    owner.execute("select mbus.create_view('q')")
    owner.execute("alter view public.q_q rename to inbox")
    owner.execute("select mbus.create_view('q')")
    owner.execute(f"grant select on public.inbox to {who.name}")
    post(owner, 1)
    session = connect_to(who.conninfo)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for view q_q"):
        session.execute("select * from public.q_q")
    assert session.execute("select data -> 'n' from public.inbox").fetchall() == [("1",)]
    owner.execute("select mbus.drop_consumer('default', 'q')")
    assert owner.execute("select to_regclass('public.inbox'), to_regclass('public.q_q')").fetchone() == (
        None,
        None,
    )


def test_a_view_of_a_restored_dump_receives(connect, restored):
    connection = connect()
    connection.execute("select mbus.create_queue('q', 2), mbus.create_view('q')")
    connection.execute("select mbus.post_q('n=>1')")
    copy = restored()
    copy.execute("select mbus.rebase_after_restore()")
    copy.execute(
        "create role reader login; grant select on public.q_q to reader; set session authorization reader"
    )
    assert copy.execute("select count(*) from public.q_q").fetchone() == (1,)


def test_a_role_that_may_select_one_column_of_a_view_receives_only_that_column(
    owner, role, connect_to, receivers
):
    who = role("reader")
    owner.execute("select mbus.create_view('q')")
    owner.execute(
        f"grant usage on schema public to {who.name}; grant select (data) on public.q_q to {who.name}"
    )
    owner.execute(
        "select mbus.post('q', 'n=>1', headers => 'h=>1'), mbus.post('q', 'n=>2', headers => 'h=>2')"
    )
    reader = connect_to(who.conninfo)
    assert reader.execute("select data -> 'n' from public.q_q").fetchall() == [("1",)]
    (receiver,) = receivers()
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=SEALED):
        reader.execute(f"select headers from {receiver}")
