"""A role can change objects only of tables and tubes whose owner it is a member of, whatever else it was granted."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest
from psycopg import sql

from tests.schemas import possible
from tests.tubes import attach, detach, make, one

GRANTS = {
    "pgchange": ["grant_admin", "grant_consumer", "grant_maintainer", "grant_reader", "grant_viewer"],
    "revision": ["grant_owner", "grant_maintainer"],
    "pubsub": ["grant_consumer", "grant_admin"],
    "tube": ["grant_consumer", "grant_owner"],
    "pgmb": [
        "grant_entry",
        "grant_writer",
        "grant_subscriber",
        "grant_conditions",
        "grant_owner",
        "grant_dispatcher",
        "grant_consumer",
        "grant_maintainer",
        "grant_admin",
    ],
    "mbus": ["grant_maintainer", "grant_admin"],
    "topology": ["grant_reader", "grant_consumer", "grant_admin", "grant_writer"],
}
"""The statements that give a role the rights of each persona, by schema."""
PERSONAS = [f"{name}.{grant}" for name, grants in GRANTS.items() for grant in grants]

OWNED = {
    "revision.tracked": "tbl",
    "revision.branch": "tbl",
    "revision.enqueued": "tbl",
    "revision.fault": "tbl",
    "tube.tube": "pods",
    "tube.attachment": "tbl",
    "tube.detached": "tbl",
    "tube.fault": "tbl",
    "tube.backfill": "tbl",
    "tube.moved": "tube",
    "tube.worker": "tube",
    "pgmb.pushed_table": "tbl",
    "pgmb.push_fault": "tbl",
    "pgchange.letter": "consumer",
    "pgchange.lag_limit": "address",
}
"""Our tables with rows about tables or tubes of users, and the column that names them."""
SHARED = {
    "revision.commit_queue": "the capture writes it with its owner's rights: who tracks is trusted with any commit",
    "pgmb.events": "the capture writes it with its owner's rights: who publishes is trusted with any event",
    "pgmb.subscriptions": "groups have no owners: who subscribes is trusted with all of them",
    "pgmb.condition": "conditions run with the rights of the owner of pgmb",
    "pgmb.config": "the log has one keeping for all",
}
"""Objects without an owner, with the reason. docs/reference/roles.md lists the trusted roles."""
REFUSED = ("42501", "22023", "PC002", "PC008")
"""The SQLSTATEs of calls that are denied, invalid, or about objects that are hidden from the caller."""
LOOKED_AT = {
    "revision.is_captured(oid,oid)": "select revision.is_captured('theirs.item'::regclass, 'theirs.item'::regclass)",
    "revision.key_columns(oid)": "select revision.key_columns('theirs.item'::regclass)",
    "tube.hold_shard(regclass)": "select tube.hold_shard('theirs.item')",
    "tube.is_attached(text,oid)": "select tube.is_attached('theirs', 'theirs.item'::regclass)",
    "pgmb.crowded_default(regclass,timestamp with time zone)": "select pgmb.crowded_default('theirs.item')",
    "pgmb.make_partitions(regclass,timestamp with time zone,boolean)": "select pgmb.make_partitions('theirs.item')",
    "pgmb.trim_partitions(regclass,timestamp with time zone,bigint,bigint)": "select pgmb.trim_partitions('theirs.item')",
    "pgmb.drop_emptied(regclass,timestamp with time zone,integer)": "select pgmb.drop_emptied('theirs.item')",
    "pgmb.maintain_append_only_table(regclass,timestamp with time zone)": (
        "select pgmb.maintain_append_only_table('theirs.item')"
    ),
}
"""Functions that run as their owner and take a table, each with a call for a table of another owner."""


@pytest.fixture
def admin(connect, role):
    """A table of another owner that is tracked, attached and published, with its visible names, and a tube of that
    owner."""
    connection, owner = connect(), role("theirs")
    for grant in ("revision.grant_owner", "tube.grant_owner", "pgmb.grant_owner"):
        connection.execute(f"select {grant}(%s::regrole)", [owner.name])
    make(connection, "shared")
    connection.execute(
        f"create schema theirs authorization {owner.name}; set search_path = theirs;"
        f"grant usage on schema public to {owner.name};"
        f"grant insert (op, shard, ids, payload, ts) on public.shared to {owner.name};"
        f"set role {owner.name};"
        "create table item (id bigint primary key, x bigint unique not null); insert into item values (1, 1);"
        "create table former (id bigint primary key)"
    )
    make(connection, "theirs")
    attach(connection, "former", "theirs", shard=1)
    detach(connection, "former", "theirs")
    attach(connection, "item", "theirs")
    attach(connection, "item", "shared")
    connection.execute("select revision.track('item'); select pgmb.push_table_mutations('item')")
    connection.execute(
        "insert into revision.fault (tbl, commit_id, message) values ('item'::regclass, 1, 'why');"
        "insert into revision.enqueued values ('item'::regclass, '3', 1, 1);"
        "insert into pgmb.push_fault (tbl, op, message) values ('item'::regclass, 'INSERT', 'why');"
        "insert into tube.fault (tube, tbl, ids, message) values ('theirs', 'item'::regclass, 1, 'why');"
        "insert into tube.moved (tube, from_shard, to_shard, upto) values ('theirs', 1, 2, 0);"
        "select tube.register('theirs', 1, 0);"
        "select tube.backfill_begin('theirs', 'item', 'id');"
        "insert into pgchange.letter (kind, consumer, address, content, changes, reason, attempts)"
        """ values ('tube', 'tube:theirs/0', '{"tube": "theirs", "worker": 0}', '{}', 1, 'why', 1);"""
        "insert into pgchange.lag_limit (kind, consumer, address, max_changes)"
        """ values ('tube', 'tube:theirs/0', '{"tube": "theirs", "worker": 0}', 1);"""
        "reset role"
    )
    return connection


def theirs(admin):
    """Return every row about the other owner's table or tube, with the version of the row."""
    found = {}
    for table, column in OWNED.items():
        query = "select xmin::text, t::text from {} as t where t.{}::text ~ 'theirs|item|former' order by 2"
        found[table] = admin.execute(
            sql.SQL(query).format(sql.Identifier(*table.split(".")), sql.Identifier(column))
        ).fetchall()
    return found


@pytest.fixture
def stranger(admin, role, connect_to):
    """A session of a role that has a grant, may write the other owner's table, and may insert pods into the shared
    tube."""

    def open_one(*grants):
        who = role("stranger")
        for grant in grants:
            admin.execute(f"select {grant}(%s::regrole)", [who.name])
        admin.execute(f"grant usage on schema public, theirs to {who.name}")
        admin.execute(f"grant select, insert, update, delete on theirs.item to {who.name}")
        admin.execute(f"grant insert (op, shard, ids, payload, ts) on public.shared to {who.name}")
        return connect_to(who.conninfo)

    return open_one


def here(admin, personas=PERSONAS):
    """The personas whose schemas this server can have."""
    held = {system.schema for system in possible(admin)}
    return [persona for persona in personas if persona.split(".")[0] in held]


def writable(admin, who):
    """Return our tables that a role may write, with the columns that it may update, and whether it may delete."""
    return admin.execute(
        """
        select n.nspname, c.relname,
               array(select a.attname::text from pg_attribute as a where a.attrelid = c.oid and a.attnum > 0
                     and not a.attisdropped and has_column_privilege(%(who)s, c.oid, a.attnum, 'update')),
               has_table_privilege(%(who)s, c.oid, 'delete'),
               has_table_privilege(%(who)s, c.oid, 'truncate, trigger, references')
        from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
        where n.nspname = any (%(schemas)s) and c.relkind in ('r', 'p', 'v') and not c.relispartition
          and (has_any_column_privilege(%(who)s, c.oid, 'insert, update')
               or has_table_privilege(%(who)s, c.oid, 'delete, truncate, trigger'))
        """,
        {"who": who.info.user, "schemas": list(GRANTS)},
    ).fetchall()


def outcome(session, call):
    """Return the SQLSTATE with which a call fails; None if it succeeds."""
    try:
        session.execute(call)
    except psycopg.Error as error:
        return error.sqlstate
    return None


def test_the_personas_are_those_that_can_be_granted(admin):
    made = admin.execute(
        "select n.nspname || '.' || p.proname from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace "
        "where n.nspname = any (%s) and p.proname like 'grant\\_%%'",
        [list(GRANTS)],
    ).fetchall()
    assert {persona for (persona,) in made} == set(here(admin))


def test_no_persona_changes_what_is_known_of_anothers_table_or_tube(admin, stranger):
    before = theirs(admin)
    assert all(before.values())
    for persona in here(admin):
        session = stranger(persona)
        for schema_name, table, columns, may_delete, may_more in writable(admin, session):
            name = f"{schema_name}.{table}"
            assert name in OWNED or name in SHARED, persona
            assert not may_more, (persona, name)
            if name in SHARED:
                continue
            changes = [f"update {name} set {column} = {column}" for column in columns]
            for change in [*changes, *([f"delete from {name}"] if may_delete else [])]:
                with suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.GeneratedAlways):
                    session.execute(change)
                assert theirs(admin) == before, (persona, change)


def test_a_function_that_runs_as_its_owner_changes_nothing_of_anothers_table(admin, stranger):
    before = theirs(admin)
    for persona in here(admin):
        session = stranger(persona)
        told_a_table = admin.execute(
            "select p.oid::regprocedure::text from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace "
            "where n.nspname = any (%s) and p.prosecdef and has_function_privilege(%s, p.oid, 'execute') "
            "and p.proargtypes::oid[] && array['regclass'::regtype, 'regclass[]'::regtype, "
            "'oid'::regtype, 'oid[]'::regtype]::oid[]",
            [list(GRANTS), session.info.user],
        ).fetchall()
        for (function,) in told_a_table:
            assert outcome(session, LOOKED_AT[function]) in (None, *REFUSED), (persona, function)
            assert theirs(admin) == before, (persona, function)


CALLS = {
    "revision.grant_owner": [
        "select revision.track('theirs.item', '{x}')",
        "select revision.untrack('theirs.item')",
        "select revision.register('theirs.item', '{x}', 0, null, 0)",
        "select revision.unregister('theirs.item')",
        "select revision.own_branch('theirs.former', '{bigint}')",
        "select revision.replay_faults('theirs.item')",
        "call revision.enqueue_existing('theirs.item')",
        "insert into revision.fault (tbl, commit_id, message) values ('theirs.item'::regclass, 1, 'none')",
        "insert into revision.tracked (tbl, key, branch_id, key_ceiling)"
        " values ('theirs.former'::regclass, '{id}', 0, 0)",
        "insert into revision.branch (type, tbl) values ('stable', 'theirs.former'::regclass)",
        "insert into revision.enqueued values ('theirs.item'::regclass, '3', 2, 2)",
    ],
    "revision.grant_maintainer": ["select revision.recapture()"],
    "pgmb.grant_owner": [
        "select pgmb.push_table_mutations('theirs.item', delete => false)",
        "select pgmb.stop_table_mutations_push('theirs.item')",
        "select pgmb.note_push('theirs.item')",
        "select pgmb.recapture()",
        "select pgmb.replay_push_faults('theirs.item')",
        "insert into pgmb.push_fault (tbl, op, message) values ('theirs.item'::regclass, 'INSERT', 'none')",
        "insert into pgmb.pushed_table (tbl, name, inserts, updates, deletes)"
        " values ('theirs.former'::regclass, 'former', true, true, true)",
    ],
    "pgmb.grant_maintainer": ["select pgmb.recapture()", "select pgmb.forget_dropped()"],
    "tube.grant_consumer": [
        "select tube.tube_table_ensure_attached('shared', 'theirs.item', 5)",
        "select tube.tube_table_ensure_detached('shared', 'theirs.item')",
        "select tube.tube_table_ensure_detached(null, null)",
        "select tube.tube_table_ensure_attached('theirs', 'theirs.former', 1)",
        "select tube.clear_faults('theirs')",
        "select tube.recapture()",
        "select tube.backfill_begin('theirs', 'theirs.item', 'id')",
        "insert into tube.moved (tube, from_shard, to_shard, upto) values ('theirs', 0, 1, 1)",
        "insert into tube.fault (tube, tbl, ids, message) values ('theirs', 'theirs.item'::regclass, 1, 'none')",
        "insert into tube.worker (tube, worker, version) values ('theirs', 0, 99)",
    ],
    "tube.grant_owner": [
        "select tube.tube_ensure_absent('theirs')",
        "select tube.tube_ensure_exists('theirs', 5)",
        "insert into tube.tube (name, pods) values ('other', 'theirs.item'::regclass)",
    ],
    "pgchange.grant_maintainer": ["select pgchange.drop_leftovers('-1 day')"],
}
"""Calls and writes that a persona may make, tried on the objects of another owner."""


def test_calls_on_another_owners_table_are_refused_or_do_nothing(admin, stranger):
    before = theirs(admin)
    for persona, calls in CALLS.items():
        session = stranger(persona)
        for call in calls:
            assert outcome(session, call) in (None, *REFUSED), (persona, call)
            assert theirs(admin) == before, (persona, call)


def test_faults_are_shown_only_to_the_owner_of_the_table(admin, stranger):
    assert stranger("revision.grant_owner").execute("select * from revision.fault").fetchall() == []


@pytest.mark.parametrize("prepare", ["track", "push"])
def test_a_table_stays_writable_when_it_gets_a_new_owner(connect, role, connect_to, prepare):
    """The capture stays with the former owner, and can no longer write its rows. No write of a user fails because of
    this."""
    admin, owner, heir = connect(), role("owner"), role("heir")
    for name in ("revision.grant_owner", "pgmb.grant_owner"):
        admin.execute(f"select {name}(%s::regrole)", [owner.name])
    admin.execute(f"create schema own authorization {owner.name}")
    session = connect_to(owner.conninfo)
    session.execute("create table own.item (id bigint primary key, by bigint)")
    if prepare == "track":
        session.execute("select revision.track('own.item', branch_id => '1 / by')")
    else:
        session.execute("select pgmb.push_table_mutations('own.item')")
        admin.execute(
            "create or replace function pgmb.serialise_record_for_event("
            "tabl oid, op text, record record, out serialised jsonb, out emit boolean) "
            "language plpgsql stable as $$ begin serialised := 1 / 0; end $$"
        )
    admin.execute(
        f"grant usage, create on schema own to {heir.name}; alter table own.item owner to {heir.name}"
    )
    connect_to(heir.conninfo).execute("insert into own.item values (1, 0)")
    faults = {"track": "revision.fault", "push": "pgmb.push_fault"}[prepare]
    assert one(admin, f"select count(*) from {faults} where tbl = 'own.item'::regclass") == 1
