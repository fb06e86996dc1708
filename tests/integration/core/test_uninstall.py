"""Removing the SQL: our objects are removed, and no object that somebody else has created."""

from __future__ import annotations

import itertools
import re

import pytest

from airflow_pgchange.admin import schema, versions
from airflow_pgchange.admin.dependent_objects import strangers
from airflow_pgchange.errors import InvalidArgument, Refused
from tests.tubes import make, one


def _case(system, *values):
    """A case for a system, on a server that can have it."""
    return pytest.param(*values, marks=pytest.mark.hstore if system.folder == "mbus" else ())


NEEDED = [_case(system, needed, system.folder) for system in versions.SYSTEMS for needed in system.needs]
"""Pairs of systems: the first is needed by the second."""
THEIRS = {
    "view": ("create view public.mine as select version from {}.installed", "view public.mine"),
    "materialized view": (
        "create materialized view public.mine as select version from {}.installed",
        "materialized view public.mine",
    ),
    "row type": ("create table public.mine (was {}.installed)", "table column public.mine.was"),
    "argument": (
        "create function public.mine({}.installed) returns int language sql as 'select 1'",
        "function public.mine",
    ),
    "body": (
        "create function public.mine() returns bigint language sql begin atomic select count(*) from {}.installed; end",
        "function public.mine",
    ),
    "child": ("create table public.mine () inherits ({}.installed)", "table public.mine"),
}
"""Objects that others can create on our tables outside of our schema, with their names."""
USED = {
    "view": ("create view public.mine as select topic from pgmb.events", "view public.mine"),
    "default": (
        "create table public.mine (id text default pgmb.create_event_id_default())",
        "default value for public.mine.id",
    ),
    "foreign key": (
        "create table public.mine (id bigint references revision.commit)",
        "table constraint mine_id_fkey on public.mine",
    ),
    "domain": ("create domain public.mine as pgmb.event_id", "type public.mine"),
}


def held(connection):
    """The installed systems, with the systems that they need."""
    there = versions.present(connection)
    return [system for system in versions.SYSTEMS if system.folder in there]


@pytest.mark.parametrize(("needed", "by"), NEEDED, ids=lambda name: name)
def test_a_system_that_another_system_needs_is_not_removed_alone(bare_db, connect_to, needed, by):
    connection = connect_to(bare_db)
    there = [state.system for state in schema.install(connection, [by])]
    with pytest.raises(InvalidArgument, match=rf"{by} needs .*{needed}.*: remove {by} first, or all at once"):
        schema.uninstall(connection, sorted({needed, *there} - {by}))
    assert versions.present(connection) == there


def test_objects_of_others_that_use_a_schema_are_named(connection):
    for system, (made, name) in itertools.product(held(connection), THEIRS.values()):
        of_ours = strangers(connection, system.schema)
        with connection.transaction(force_rollback=True):
            connection.execute(made.format(system.schema))
            [found] = set(strangers(connection, system.schema)).difference(of_ours)
            assert found.startswith(name), system.folder


def test_objects_of_others_that_use_our_objects_elsewhere_are_never_dropped(connection):
    make(connection, "q")
    connection.execute("create view public.mine as select seq from public.q")
    with pytest.raises(Refused, match=r"schema tube is used by others: view \S*mine .*first"):
        schema.uninstall(connection)


def test_tables_by_the_names_and_columns_of_ours_are_not_taken_for_ours(bare_db, connect_to):
    connection = connect_to(bare_db)
    connection.execute(
        "create schema topology; create table topology.precious (id int);"
        "create table topology.installed (version integer, checksum text, installed_at timestamptz)"
    )
    assert schema.uninstall(connection) == versions.present(connection) == []
    with pytest.raises(Refused, match="schema topology .* is not ours"):
        schema.install(connection)
    assert one(connection, "select to_regclass('topology.precious') is not null")


def test_objects_of_others_that_use_ours_are_never_dropped(connection):
    for made, name in USED.values():
        connection.execute(made)
        with pytest.raises(Refused, match=rf"is used by others: {re.escape(name)}"):
            schema.uninstall(connection)
        connection.execute(f"drop {made.split()[1]} public.mine")
    schema.uninstall(connection)


def test_a_refused_uninstall_leaves_all_captures(connection):
    connection.execute("create table public.ledger (id bigint primary key); select revision.track('ledger')")
    connection.execute("create view public.mine as select id from revision.commit_queue")
    with pytest.raises(Refused, match="view public.mine"):
        schema.uninstall(connection)
    connection.execute("insert into public.ledger values (7)")
    assert one(connection, "select commit_id from revision.commit_queue") == 7


@pytest.mark.parametrize("system", [_case(s, s) for s in versions.SYSTEMS], ids=lambda system: system.folder)
def test_a_schema_that_was_dropped_by_hand_is_installed_again_or_what_to_do_is_told(connection, system):
    there = [other.folder for other in held(connection)]
    users = [other.folder for other in held(connection) if system.folder in other.needs]
    connection.execute(f"drop schema {system.schema} cascade")
    if users:
        with pytest.raises(Refused, match=rf"schema {system.schema} .*uninstall --system {users[0]}"):
            schema.install(connection)
        schema.uninstall(connection, users)
    schema.install(connection)
    assert versions.present(connection) == there
    assert all(state.intact for state in versions.installed(connection) if state.system not in users)


def test_letters_of_a_schema_that_was_dropped_by_hand_are_void(connection):
    connection.execute(
        "insert into pgchange.letter (kind, consumer, address, content, changes, reason, attempts)"
        " values ('commit', 'commit:c/0', '{}', '{}', 1, 'why', 1)"
    )
    connection.execute("drop schema pubsub cascade")
    schema.install(connection)
    assert "dropped" in one(connection, "select void from pgchange.letter")
