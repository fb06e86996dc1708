"""Functions and columns that existing users call by name keep their names, arguments, defaults and results."""

from __future__ import annotations

import inspect

import pytest

from airflow_pgchange.events import EventHandlers
from airflow_pgchange.events.webhooks import webhook
from airflow_pgchange.operators.handlers import EventHandlersOperator

TIME = "timestamp with time zone"
STATS = "".join(
    f"{kind}_count text, {kind}_min_seq bigint, {kind}_max_seq bigint, {kind}_min_ts {TIME}, {kind}_max_ts {TIME}, "
    for kind in ("inc", "backfill")
)
TUBE = {
    "tube_ensure_exists(tube text, partitions integer, predicate text, key regtype[])": "void",
    "tube_ensure_absent(in_tube text)": "void",
    "tube_table_ensure_attached(tube text, tbl regclass, shard integer, key name[], group_by name[])": "void",
    "tube_table_ensure_detached(in_tube text, in_tbl regclass)": "void",
    "tube_list(in_tbl regclass)": "TABLE(tube text, predicate text, partitions integer, tbl regclass, shard integer)",
    "tube_stats()": f"TABLE(tube text, predicate text, partition integer, shards integer, {STATS}control_count text)",
    "tube_pods_sql(tube text, partitions integer, partition integer, exclude_backfill boolean = false)": "text",
    "tube_pods_delete(tube text, partitions integer, partition integer, seqs bigint[])": "integer",
    "tube_pods_insert(tube_or_tubes text, query text, shard integer, op character = 'B', approx_size bigint, "
    "fetch_chunk_size integer = 20000, insert_chunk_size integer = 250)": "void",
    "tube_backfill_schedule(in_tube text, order_col text, shard_from integer, shard_to integer)": "integer",
    "tube_backfill_step1()": "text",
    "tube_backfill_step2(timeout interval = '00:01:00')": "void",
    "tube_backfill_step3(step1 text, tube text, tbl regclass, order_col text, shard integer, "
    "fetch_chunk_size integer = 20000, insert_chunk_size integer = 250)": "void",
}
TOUCHES = {
    "q_touch(shard integer, ids bigint[], op character, payload jsonb, chunk_size integer = 250)": "void",
    "item_touch(ids bigint[], op character = 'T', payload jsonb, chunk_size integer = 250)": "void",
}
PGMB = {
    f"create_event_id(ts {TIME}, rand bigint)": "pgmb.event_id",
    "create_event_id_default()": "pgmb.event_id",
    "create_random_bigint()": "bigint",
    "extract_date_from_event_id(id text)": TIME,
    "create_subscription_id()": "pgmb.subscription_id",
    "get_config_value(config_id pgmb.config_type)": "text",
    "poll_for_events()": "integer",
    "prepare_poll_for_events_fn(sql_statements text[])": "void",
    "read_next_events(gid character varying, cursor pgmb.event_id, "
    "chunk_size integer = (pgmb.get_config_value(('poll_chunk_size')::pgmb.config_type))::integer, "
    "peek boolean = false)": (
        "TABLE(id pgmb.event_id, topic character varying, payload jsonb, metadata jsonb, "
        "subscription_ids pgmb.subscription_id[], next_cursor pgmb.event_id)"
    ),
    "read_events(event_ids pgmb.event_id[])": "SETOF pgmb.events",
    "replay_events(gid character varying, sid character varying, from_event_id pgmb.event_id, "
    "max_events integer)": "SETOF pgmb.events",
    "set_group_cursor(gid character varying, new_cursor pgmb.event_id, release_lock boolean = false)": "void",
    "release_group_lock(gid character varying)": "boolean",
    "maintain_events_table()": "SETOF text",
    f"maintain_append_only_table(tbl regclass, current_ts {TIME} = now())": "SETOF text",
    "get_partitions_and_bounds(table_id oid)": (
        "TABLE(partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)"
    ),
    f"get_current_partition(table_id oid, current_ts {TIME} = now())": "regclass",
    "push_table_mutations(tbl regclass, insert boolean = true, delete boolean = true, update boolean = true)": "void",
    "stop_table_mutations_push(tbl regclass)": "void",
    "serialise_record_for_event(tabl oid, op text, record record, OUT serialised jsonb, OUT emit boolean)": "record",
    "create_topic(schema_name text, table_name text, kind text)": "text",
    "jsonb_diff(a jsonb, b jsonb)": "jsonb",
}
COLUMNS = {
    "pgmb.config": "id, value, key",
    "pgmb.events": "id, topic, payload, metadata, subscription_id",
    "pgmb.unread_events": "event_id",
    "pgmb.subscription_groups": "id, created_at, last_read_event_id",
    "pgmb.subscriptions": "id, group_id, conditions_sql, params, identity, last_active_at, expiry_interval",
    "pgmb.subscription_events": "id, group_id, event_id, subscription_id",
    "public.q": "seq, op, shard, ids, payload, ts",
}
# Leave out the types of constants, and defaults that are null.
SIGNATURES = r"""
    select replace(
               regexp_replace(
                   regexp_replace(pg_get_function_arguments(p.oid), ' DEFAULT NULL::[a-z_. ]+(\[\])?', '', 'g'),
                   '(''[^'']*'')::[a-z_.]+', '\1', 'g'),
               ' DEFAULT ', ' = '),
           pg_get_function_result(p.oid)
    from pg_proc as p where p.proname = %s and p.pronamespace = %s::regnamespace
"""


ATTACHED = """
    create table public.item (id bigint primary key);
    select tube.tube_ensure_exists('q');
    select tube.tube_table_ensure_attached('q', 'public.item', 0)
"""


@pytest.fixture
def connection(connect):
    connection = connect()
    connection.execute(ATTACHED)
    return connection


@pytest.fixture(scope="module")
def attached(shared):
    """A connection to a database whose catalogue is only read."""
    shared.execute(ATTACHED)
    return shared


@pytest.mark.parametrize(
    ("schema", "signature", "result"),
    [
        (schema, *function)
        for schema, functions in (("tube", TUBE), ("public", TOUCHES), ("pgmb", PGMB))
        for function in functions.items()
    ],
    ids=lambda value: value.partition("(")[0],
)
def test_a_function_is_called_as_ever(attached, schema, signature, result):
    name, _, arguments = signature.removesuffix(")").partition("(")
    assert (arguments, result) in attached.execute(SIGNATURES, [name, schema]).fetchall()


@pytest.mark.parametrize(("relation", "columns"), COLUMNS.items())
def test_a_relation_has_the_columns_of_ever(attached, relation, columns):
    wanted = columns.split(", ")
    found = [column.name for column in attached.execute(f"select * from {relation}").description]
    assert found[: len(wanted)] == wanted


def test_pods_of_three_steps_have_the_size_that_was_asked_for(connection):
    connection.execute("insert into item select generate_series(1, 250)")
    begun = connection.execute("select tube.tube_backfill_step1()").fetchone()[0]
    connection.execute("select tube.tube_backfill_step2()")
    step3 = "select tube.tube_backfill_step3(%s, 'q', 'item', 'id', insert_chunk_size => 100)"
    connection.execute(step3, [begun])
    sizes = connection.execute(
        "select cardinality(ids) from q where op = 'B' and ids <> '{}' order by seq"
    ).fetchall()
    assert sizes == [(100,), (100,), (50,)]


def test_how_many_a_query_gives_may_be_told_and_changes_nothing(connection):
    connection.execute(
        "select tube.tube_pods_insert('q', 'select 1::bigint, 1::bigint', 0, approx_size => 1000000)"
    )
    assert connection.execute("select ids from q").fetchall() == [([1],)]


def test_an_id_of_one_moment_is_made_of_it_and_of_chance(connection):
    query = "select pgmb.create_random_bigint() from generate_series(1, 1000)"
    drawn = {number for (number,) in connection.execute(query)}
    assert len(drawn) > 990
    assert min(drawn) >= 0


def test_a_subscription_is_named_by_when_it_was_made(connection):
    connection.execute("insert into pgmb.subscriptions (group_id) values ('g')")
    query = (
        "select abs(extract(epoch from pgmb.extract_date_from_event_id(s.id) - now())) < 60 "
        "from (select id from pgmb.subscriptions union all select pgmb.create_subscription_id()) as s"
    )
    assert connection.execute(query).fetchall() == [(True,), (True,)]


def test_the_index_of_params_is_written_at_once(connection):
    query = """
        select c.reloptions from pg_class as c join pg_am as a on a.oid = c.relam
        where c.relnamespace = 'pgmb'::regnamespace and a.amname = 'gin'
    """
    assert connection.execute(query).fetchall() == [(["fastupdate=off"],)]


def test_a_read_takes_as_many_as_the_configuration_says(connection):
    connection.execute("insert into pgmb.subscriptions (group_id) values ('g')")
    connection.execute("insert into pgmb.events (topic, payload) select 't', '1' from generate_series(1, 5)")
    connection.execute("update pgmb.config set value = '3' where key = 'poll_chunk_size'")
    connection.execute("select pgmb.poll_for_events()")
    connection.execute("select pgmb.poll_for_events()")
    assert len(connection.execute("select * from pgmb.read_next_events('g')").fetchall()) == 3


@pytest.mark.parametrize(
    ("made", "name", "default"),
    [
        (EventHandlers, "read_ahead", 10),
        (EventHandlersOperator, "read_ahead", 10),
        (webhook, "timeout", 5.0),
    ],
)
def test_a_limit_is_the_one_that_was_promised(made, name, default):
    assert inspect.signature(made).parameters[name].default == default
