"""The rights to publish a table's mutations, and the rights of roles that write to it."""

from __future__ import annotations

import psycopg
import pytest

from tests.mutations import events, faults, push, push_items, serialise, stop
from tests.tubes import one


@pytest.fixture
def item(connect):
    """A table of which every mutation is published as an event."""
    return push_items(connect())


def test_a_plain_writer_needs_no_right_of_ours(item, role):
    writer = role("writer")
    item.execute(f"grant select, insert, update, delete on item to {writer.name}")
    with psycopg.connect(writer.conninfo) as as_writer:
        as_writer.execute("create temporary table events (id int, topic text, payload jsonb, metadata jsonb)")
        as_writer.execute("set search_path = pg_temp, public")
        as_writer.execute("insert into item values (1, 'a', 5)")
        as_writer.execute("update item set amount = 6")
        as_writer.execute("delete from item")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), as_writer.transaction():
            as_writer.execute("select * from pgmb.events")
    assert len(events(item)) == 3


def test_an_owner_publishes_its_own_tables_and_no_others(item, role):
    owner = role("owner")
    item.execute(f"create schema own authorization {owner.name}")
    item.execute(f"grant usage on schema public to {owner.name}")
    with psycopg.connect(owner.conninfo, autocommit=True) as as_owner:
        as_owner.execute("create table own.thing (id int)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            push(as_owner, "own.thing")
        item.execute(f"select pgmb.grant_owner('{owner.name}')")
        push(as_owner, "own.thing")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="only the owner of public.item"):
            push(as_owner, "item")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stop(as_owner, "item")
        as_owner.execute("insert into own.thing values (1)")
        assert as_owner.execute("select pgmb.recapture()").fetchall() == []
        stop(as_owner, "own.thing")
        as_owner.execute("insert into own.thing values (1)")
    item.execute("insert into item values (1, 'a', 5)")
    assert [topic for topic, _, _ in events(item)] == ["own.thing.insert", "public.item.insert"]


def test_faults_show_rows_to_the_owner_of_the_table_only(item, role):
    other = role("other")
    item.execute(f"select pgmb.grant_owner('{other.name}')")
    serialise(item, "serialised := 1 / 0;")
    item.execute("insert into item values (1, 'a', 5)")
    with psycopg.connect(other.conninfo, autocommit=True) as as_other:
        assert faults(as_other) == []
    assert len(faults(item)) == 1


@pytest.fixture
def own_thing(item, role):
    """A table of another owner whose mutations are published. Return the owner's role, and a connection as that role."""
    owner = role("owner")
    item.execute(f"create schema own authorization {owner.name}; select pgmb.grant_owner('{owner.name}')")
    with psycopg.connect(owner.conninfo, autocommit=True) as as_owner:
        as_owner.execute("create table own.thing (id int)")
        push(as_owner, "own.thing")
        yield owner, as_owner


@pytest.mark.parametrize(
    "mended_by", ["select pgmb.recapture()", "select pgmb.push_table_mutations('own.thing')"]
)
def test_repairing_all_tables_overwrites_no_function_of_another_owner(item, own_thing, mended_by):
    item.execute(
        "create function audit() returns trigger language plpgsql as $$ begin raise 'audited'; end $$; "
        "create trigger audited after insert on item for each row execute function audit()"
    )
    known = "select p::text from pg_proc as p where p.proname = 'audit'"
    before = one(item, known)
    _, as_owner = own_thing
    as_owner.execute(
        "drop trigger pgmb_push_insert on own.thing; create trigger pgmb_push_insert after insert on own.thing "
        "referencing new table as added for each statement execute function public.audit()"
    )
    item.execute(mended_by)
    assert one(item, known) == before
    as_owner.execute("insert into own.thing values (1)")
    assert [topic for topic, _, _ in events(item)] == ["own.thing.insert"]


def test_rows_that_failed_are_not_made_events_for_who_does_not_own_the_table(item, own_thing):
    owner, as_owner = own_thing
    as_owner.execute(
        "create table own.seen (who text);"
        "create function own.spy(int) returns boolean language plpgsql as "
        "$$ begin insert into own.seen values (current_user); return true; end $$;"
        "create domain own.spied as int check (own.spy(value)); alter table own.thing add more own.spied;"
        "truncate own.seen;"
        "insert into pgmb.push_fault (tbl, op, message, after) values "
        "('own.thing'::regclass, 'INSERT', 'mine', '{\"id\": 1, \"more\": 2}')"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"its owner, {owner.name}, and no others"):
        item.execute("select pgmb.replay_push_faults('own.thing')")
    assert one(as_owner, "select pgmb.replay_push_faults('own.thing')") == 1
    assert item.execute("select distinct who from own.seen").fetchall() == [(owner.name,)]


def test_stopping_drops_no_function_of_another_owner(item, own_thing):
    item.execute("create function audit() returns trigger language plpgsql as $$ begin return null; end $$")
    _, as_owner = own_thing
    as_owner.execute(
        "drop trigger pgmb_push_insert on own.thing; create trigger pgmb_push_insert after insert on own.thing "
        "referencing new table as added for each statement execute function public.audit()"
    )
    stop(item, "own.thing")
    assert one(item, "select to_regproc('public.audit') is not null")


@pytest.mark.parametrize("do", [push, stop], ids=["mend", "stop"])
def test_a_new_owner_has_the_capture_of_the_table(item, own_thing, role, do):
    heir = role("heir")
    item.execute(
        f"select pgmb.grant_owner('{heir.name}'); grant usage, create on schema own to {heir.name}; "
        f"alter table own.thing owner to {heir.name}"
    )
    with psycopg.connect(heir.conninfo, autocommit=True) as as_heir:
        do(as_heir, "own.thing")
        as_heir.execute("insert into own.thing values (1)")
    assert [topic for topic, _, _ in events(item)] == (["own.thing.insert"] if do is push else [])
    assert (
        one(item, "select count(*) from pgmb.pushing() as p where p.tbl = 'own.thing'::regclass and p.stale")
        == 0
    )


def test_an_owner_who_may_publish_no_more_still_may_write(item, role):
    owner = role("owner")
    item.execute(f"create schema own authorization {owner.name}; select pgmb.grant_owner('{owner.name}')")
    with psycopg.connect(owner.conninfo, autocommit=True) as as_owner:
        as_owner.execute("create table own.thing (id int)")
        push(as_owner, "own.thing")
        item.execute(f"revoke insert (topic, payload, metadata) on pgmb.events from {owner.name}")
        told = []
        as_owner.add_notice_handler(lambda notice: told.append(notice.message_primary))
        as_owner.execute("insert into own.thing values (1)")
        assert told == ["a change of own.thing was not published: its owner may not publish events"]
