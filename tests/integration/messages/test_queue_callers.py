"""Functions of message queues check the rights of the role whose code runs, and never of the session user."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.callers import WAYS, Stranger
from tests.conftest import Role
from tests.queue_calls import EVERY, FREE
from tests.queues import post, there, under_roles
from tests.waiting import until

pytestmark = pytest.mark.hstore

DENIED = "Access denied"


@pytest.fixture
def stranger(owner, role, connect_to):
    """A role without any right of ours. Its code calls every function that all roles may call."""
    who = role("stranger")
    post(owner, 1)
    return Stranger.with_calls(owner, who, connect_to(who.conninfo), EVERY)


@pytest.mark.parametrize("way", WAYS)
def test_a_strangers_code_may_do_in_a_superusers_session_what_it_may_by_itself(owner, stranger, way):
    alone = stranger.by_itself()
    assert {call for call, told in alone.items() if told == "42501"} == EVERY - FREE
    assert stranger.in_session_of(owner, way) == alone


@pytest.mark.parametrize("way", ["security definer"])
def test_a_strangers_function_may_not_do_what_the_member_may_who_calls_it(
    owner, stranger, role, connect_to, way
):
    member = role("member")
    owner.execute(f"grant mbus_{owner.info.dbname}_admin to {member.name}")
    alone = stranger.by_itself()
    assert stranger.in_session_of(connect_to(member.conninfo), way) == alone


def test_a_member_that_does_not_inherit_needs_set_role(owner, role, connect_to):
    who = role("user")
    right = f"mbus_{owner.info.dbname}_post_q"
    owner.execute(f"alter role {who.name} noinherit; grant {right} to {who.name}")
    session = connect_to(who.conninfo)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=DENIED) as refused:
        session.execute("select mbus.post_q('n=>1')")
    assert refused.value.diag.message_hint == f"run first: set role {right}"
    session.execute(f"set role {right}")
    session.execute("select mbus.post_q('n=>1')")
    assert there(owner) == ["1"]


def test_a_strangers_code_has_no_right_in_an_autovacuum_worker(own_cluster, own_database, connect_to):
    """Takes seconds, until autovacuum runs.

    An autovacuum worker is logged in as a superuser, and runs the functions of a table's indexes as the table's owner.
    """
    owner = connect_to(own_database)
    with under_roles(owner):
        owner.execute("create role stranger login")
        who = Role("stranger", make_conninfo(own_database, user="stranger"))
        stranger = Stranger.with_calls(owner, who, connect_to(who.conninfo), EVERY)
        alone = stranger.by_itself()
        for setting in ("autovacuum_naptime = '1s'", "autovacuum = on"):
            owner.execute(f"alter system set {setting}")
        stranger.session.execute("insert into stranger.item select generate_series(10, 100)")
        stranger.outcome()
        owner.execute("select pg_reload_conf()")
        until(owner, "select exists (select from stranger.outcome)")
        owner.execute("alter system set autovacuum = off")
        owner.execute("select pg_reload_conf()")
        assert stranger.outcome() == alone
