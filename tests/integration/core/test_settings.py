"""A user's expression has the same meaning in every session, whatever the session has set."""

from __future__ import annotations

import pytest

from airflow_pgchange.events import Event, Selection, publish, subscribe
from tests.commits import queued
from tests.events import poll, read
from tests.sessions import SPEAKING
from tests.tubes import attach, begin, faults, make, one, run, touched

CHANGE_HOW_NOT_WHAT = (
    "Client Connection Defaults / Shared Library Preloading",
    "Connections and Authentication",
    "Developer Options",
    "Error Handling",
    "Lock Management",
    "Query Tuning",
    "Replication",
    "Reporting and Logging",
    "Resource Usage",
    "Statistics",
    "Vacuuming",
    "Write-Ahead Log",
)
"""Categories of settings that only affect how a query is executed, logged or counted."""
NOT_PINNED = {
    "check_function_bodies": "about functions that are made",
    "client_encoding": "the client reads what it has chosen; PostgreSQL computes in the database's encoding",
    "client_min_messages": "about notices",
    "createrole_self_grant": "about roles that are made",
    "default_table_access_method": "about tables that are made",
    "default_tablespace": "about tables that are made",
    "default_toast_compression": "about how values are stored",
    "default_transaction_deferrable": "about the next transaction",
    "default_transaction_isolation": "about the next transaction",
    "default_transaction_read_only": "about the next transaction",
    "escape_string_warning": "about warnings",
    "plpgsql.extra_errors": "about functions that are made",
    "plpgsql.extra_warnings": "about functions that are made",
    "plpgsql.print_strict_params": "about the detail of an error",
    "gin_pending_list_limit": "about how an index is kept",
    "icu_validation_level": "about collations that are made",
    "idle_in_transaction_session_timeout": "ends the session",
    "idle_session_timeout": "ends the session",
    "lock_timeout": "ends the statement",
    "restrict_nonsystem_relation_kind": "lets a query fail; not every PostgreSQL 15 has it",
    "search_path": "each function pins its own",
    "statement_timeout": "ends the statement",
    "synchronize_seqscans": "about an order that no query has asked for",
    "temp_tablespaces": "about tables that are made",
    "timezone_abbreviations": "PostgreSQL would read a file at each call, for 0.1 ms; docs/how-to/tubes.md has a remedy",
    "transaction_deferrable": "is that of the transaction",
    "transaction_isolation": "is that of the transaction",
    "transaction_read_only": "is that of the transaction",
    "transaction_timeout": "ends the session",
    "vacuum_failsafe_age": "about vacuum, as those that follow",
    "vacuum_freeze_min_age": "",
    "vacuum_freeze_table_age": "",
    "vacuum_multixact_failsafe_age": "",
    "vacuum_multixact_freeze_min_age": "",
    "vacuum_multixact_freeze_table_age": "",
}
"""The other settings that are not pinned, and why."""


USERS = [
    "revision.track(regclass, name[], text)",
    "revision.enqueue_row(regclass, text)",
    "revision.enqueue_chunk(regclass, integer)",
    "revision.enqueue_attached(regclass)",
    "tube.parse_predicate(text)",
    "tube.check_predicate(text, regclass)",
    "tube.backfill_slice(tube.tube, tube.attachment, name, tube.keyset, integer, integer)",
    "pgmb.compiles(text)",
    "pgmb.is_volatile(text)",
    "pgmb.evaluate(pgmb.condition, text, text[], text[], integer, bigint)",
    "pgmb.replay_push_faults(regclass)",
    "pgmb.publish_attached(regclass)",
]
"""Our functions that insert a user's expression, or a row of a user's table, into a query."""
UNPINNED = """
    select p.proname::text, s.name
    from pg_proc as p cross join pgchange.pinned_settings() as s
    where (p.proname ~ '^pgchange_(capture|touch_(insert|update|delete)|judge|push)_' or p.oid = any (%s::regprocedure[]))
      and not exists (
          select from unnest(p.proconfig) as c
          where lower(c) = lower(s.name || '=' || case s.value when 'ISO, MDY' then '"ISO, MDY"' else s.value end)
             or lower(c) = lower(s.name || '=' || s.value))
"""


@pytest.fixture
def item(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, note text)")
    return connection


@pytest.fixture
def elsewhere(connect):
    """A session with another value of the setting, for each case."""
    return connect()


def test_every_setting_that_a_session_may_choose_is_pinned_or_changes_no_value(shared):
    shared.execute("do $$ begin end $$")  # Load plpgsql, which has settings of its own.
    chosen = shared.execute(
        "select s.name, s.category from pg_settings as s where s.context = 'user' "
        "and lower(s.name) not in (select lower(p.name) from pgchange.pinned_settings() as p)"
    ).fetchall()
    unknown = {name for name, category in chosen if not category.startswith(CHANGE_HOW_NOT_WHAT)}
    assert unknown - NOT_PINNED.keys() == set()


def test_every_function_that_evaluates_a_users_expression_has_all_pinned_settings(item):
    make(item, predicate="note is not null")
    attach(item)
    item.execute("select revision.track('item', branch_id => '0 * id'), pgmb.push_table_mutations('item')")
    assert item.execute(UNPINNED, [USERS]).fetchall() == []


def test_an_expression_gives_a_commit_the_same_branch_in_every_session(item, elsewhere):
    branches = {}
    for place, (setting, condition) in enumerate(SPEAKING.items()):
        table = f"item_{place}"
        item.execute(f"create table {table} (id bigint primary key, note text)")
        item.execute(f"insert into {table} values (0, 'running'); truncate revision.commit_queue")
        elsewhere.execute(f"reset all; set {setting}")
        item.execute("select revision.track(%s, branch_id => %s)", [table, as_branch(condition)])
        elsewhere.execute(f"insert into {table} values (1, 'running')")
        elsewhere.execute(f"call revision.enqueue_existing('{table}')")
        branches[setting] = sorted(queued(item))
    assert branches == {setting: [(0, 0), (1, 0)] for setting in SPEAKING}


def as_branch(condition):
    return f"case when {condition.format('note')} then 0 end"


def test_a_predicate_holds_for_the_same_rows_in_every_session(item, elsewhere):
    make(item)
    held = {}
    for setting, condition in SPEAKING.items():
        make(item, predicate=condition.format("note"))
        attach(item)
        item.execute("truncate item; truncate q")
        elsewhere.execute(f"reset all; set {setting}")
        elsewhere.execute("insert into item values (1, 'running')")
        written = touched(item)
        kept = one(elsewhere, "select tube.wanted('q', 'item', '{1}')")
        item.execute("truncate q")
        run(elsewhere, begin(elsewhere, order_col="id"))
        held[setting] = (written, kept, touched(item), faults(item))
        item.execute("truncate q")
    assert held == dict.fromkeys(SPEAKING, ([1], 1, [1], []))


def test_a_condition_holds_for_the_same_events_whoever_polls(item, elsewhere):
    got = {}
    for place, (setting, condition) in enumerate(SPEAKING.items()):
        elsewhere.execute(f"reset all; set {setting}")
        subscribe(elsewhere, f"g{place}", Selection(condition.format("(e.payload ->> 'note')")))
        publish(item, Event("t", {"note": "running"}))
        poll(elsewhere)
        got[setting] = len(read(item, f"g{place}"))
    assert got == dict.fromkeys(SPEAKING, 1)
