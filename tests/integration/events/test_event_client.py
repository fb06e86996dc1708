"""The calls of existing clients of the event log, with their exact wording and order."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import psycopg
import pytest

from airflow_pgchange.admin import dead_letters, schema
from airflow_pgchange.events import Handler
from airflow_pgchange.events.replay import replay
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests.event_keeping import configure, dispatch, lines, maintain, subscribe
from tests.findings import findings
from tests.handling import group
from tests.tubes import one

MAINTAIN = "CALL pgmb.maintain_events_table(%s::timestamptz)"
PUBLISH = (
    "INSERT INTO pgmb.events (id, topic, payload, metadata) "
    "VALUES (COALESCE(%s, pgmb.create_event_id_default()), %s, %s, %s) RETURNING id"
)
SUBSCRIBE = (
    "INSERT INTO pgmb.subscriptions (group_id, conditions_sql, params, expiry_interval) VALUES (%s, %s, %s, %s) "
    "ON CONFLICT (identity) DO UPDATE SET last_active_at = NOW(), expiry_interval = EXCLUDED.expiry_interval RETURNING id"
)
BY_TOPIC = "s.params @> jsonb_build_object('topic', e.topic)"


def test_a_client_starts_publishes_reads_retries_and_ends(connection):
    for key, value in [
        ("partition_interval", "2 hours"),
        ("partition_retention_period", "1 hour"),
        ("future_intervals_to_create", "2 hours"),
        ("poll_chunk_size", "500"),
        ("use_pg_cron", "true"),
    ]:
        connection.execute("UPDATE pgmb.config SET value = %s WHERE id = %s", [value, key])
    [now] = connection.execute("select now()").fetchone()
    connection.execute(MAINTAIN, [now])
    connection.execute("SELECT pgmb.maintain_events_table()")
    sid = one(connection, SUBSCRIBE, "g", BY_TOPIC, json.dumps({"topic": "a"}), "15 seconds")
    assert sid == one(connection, SUBSCRIBE, "g", BY_TOPIC, json.dumps({"topic": "a"}), "20 seconds")
    first = one(connection, PUBLISH, None, "a", json.dumps({"n": 1}), None)
    one(connection, PUBLISH, None, "b", json.dumps({"n": 2}), None)
    one(connection, "select pgmb.create_event_id(%s, %s)", now, 7)
    assert one(connection, "SELECT pgmb.poll_for_events()") == 1

    read = (
        "SELECT id, topic, payload, metadata, subscription_ids::text[], next_cursor "
        "FROM pgmb.read_next_events(%s, %s, %s)"
    )
    [row] = connection.execute(read, ["g", None, 100]).fetchall()
    assert row[:5] == (first, "a", {"n": 1}, None, [sid])
    connection.execute(
        "insert into pgmb.events (id, topic, payload, subscription_id) "
        "values (pgmb.create_event_id(now(), 0), 'pgmb-retry', %s, %s)",
        [json.dumps({"ids": [first], "retryNumber": 1, "handlerName": "h"}), sid],
    )
    connection.execute("SELECT pgmb.set_group_cursor(%s, %s, %s)", ["g", row[5], True])
    connection.execute("SELECT pgmb.poll_for_events()")
    [again] = connection.execute(read, ["g", None, 100]).fetchall()
    assert again[1:3] == ("pgmb-retry", {"ids": [first], "retryNumber": 1, "handlerName": "h"})
    assert one(connection, "SELECT id FROM pgmb.read_events(%s::pgmb.event_id[])", [first]) == first
    connection.execute("SELECT pgmb.set_group_cursor(%s, %s, %s)", ["g", again[5], True])
    connection.execute("DELETE FROM pgmb.subscriptions WHERE id = %s", [sid])
    connection.execute("DROP SCHEMA pgmb CASCADE")


async def by_asyncpg(dsn: str) -> tuple[object, ...]:
    connection = await asyncpg.connect(dsn)
    try:
        now = await connection.fetchval("select now()")
        await connection.execute("CALL pgmb.maintain_events_table($1::timestamptz)", now)
        sid = await connection.fetchval(
            "INSERT INTO pgmb.subscriptions (group_id, conditions_sql, params, expiry_interval) "
            "VALUES ($1, $2, $3, $4::text::interval) RETURNING id",
            *("g", "TRUE", "{}", "5 seconds"),
        )
        await connection.execute(
            "INSERT INTO pgmb.events (topic, payload, metadata, subscription_id) VALUES ($1, $2, $3, $4)",
            *("a", "{}", None, sid),
        )
        assert await connection.fetchval("SELECT pgmb.poll_for_events()") == 1
        [row] = await connection.fetch("SELECT * FROM pgmb.read_next_events($1)", "g")
        await connection.fetchval("SELECT pgmb.set_group_cursor($1, $2, true)", "g", row["next_cursor"])
        return row["topic"], row["metadata"]
    finally:
        await connection.close()


def test_the_same_goes_with_another_driver(db):
    info = psycopg.conninfo.conninfo_to_dict(db)
    dsn = f"postgresql://{info['user']}@{info['host']}:{info['port']}/{info['dbname']}"
    assert asyncio.run(by_asyncpg(dsn)) == ("a", None)


def test_maintenance_as_of_a_time_tells_by_notices_what_it_did(connection):
    subscribe(connection, "passing", expiry_interval="15 minutes")
    told = []
    connection.add_notice_handler(lambda notice: told.append(notice.message_primary))
    connection.execute("call pgmb.maintain_events_table(now() + interval '20 minutes')")
    assert "1 subscriptions of group passing expired, and the group with them" in told


def test_an_event_published_without_metadata_comes_to_handlers_and_once_more(connection, db):
    sid = subscribe(connection, "g")
    since = one(connection, "select now()")
    connection.execute("insert into pgmb.events (topic, payload, metadata) values ('a', '1', null)")
    came = []
    group(db, Handler("h", lambda delivery: came.extend(delivery.events))).run("empty")
    assert [dict(event.metadata) for event in came] == [{}]
    assert replay(connection, "g", sid, since, 10) == 1
    assert one(connection, "select count(*) from pgmb.events where metadata ? 'replay_of'") == 1


def test_an_event_published_without_metadata_is_sent_again_from_a_dead_letter(connection, db):
    subscribe(connection, "g")
    connection.execute("insert into pgmb.events (topic, payload, metadata) values ('a', '1', null)")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(EventFeed("g"), db, db) as consumer:
        consumer.claim(10)
        raise ZeroDivisionError
    connection.execute("select pgmb.skip_batch('g', 'no use')")
    assert len(dead_letters.redrive(connection, consumer="events:g")) == 1
    dispatch(connection)
    [(again,)] = connection.execute("select metadata from pgmb.read_next_events('g')").fetchall()
    assert list(again) == ["replay_of"]


@pytest.mark.parametrize("value", ["true", "false"])
def test_pg_cron_is_taken_and_told_that_our_maintenance_does_the_work(connection, value):
    told = []
    connection.add_notice_handler(lambda notice: told.append((notice.message_primary, notice.message_hint)))
    configure(connection, use_pg_cron=value)
    assert one(connection, "select pgmb.get_config_value('use_pg_cron')") == value
    assert len(told) == (value == "true")
    assert all("pgchange_maintenance" in hint and "pgmb.maintain_events_table()" in hint for _, hint in told)


@pytest.mark.parametrize("value", ["yes", None])
def test_pg_cron_is_either_true_or_false(connection, value):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="use_pg_cron must be true or false"):
        configure(connection, use_pg_cron=value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"partition_retention_period": "29 minutes"}, "partition_retention_period, 00:29:00, is shorter"),
        ({"partition_interval": "2 hours"}, "partition_retention_period, 01:00:00, is shorter"),
        ({"future_intervals_to_create": "29 minutes"}, "future_intervals_to_create, 00:29:00, is shorter"),
        ({"future_intervals_to_create": "1 year"}, "is more than 1000 partitions"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_taken_and_told_at_maintenance(connection, settings, said):
    configure(connection, **settings)
    assert [line for line in maintain(connection) if said in line] != []
    assert [line for line in findings(connection, "pgmb") if said in line] != []


def test_no_more_than_a_thousand_partitions_are_made_ahead(connection):
    configure(connection, partition_interval="1 minute", future_intervals_to_create="1000 years")
    [[missing]] = connection.execute(
        "select count(*) from pgmb.missing_partitions('pgmb.events', now() + interval '1 day')"
    ).fetchall()
    assert 1000 <= missing <= 1001


def test_with_a_retention_shorter_than_a_partition_nothing_younger_is_deleted(connection):
    configure(connection, partition_retention_period="1 second")
    connection.execute("insert into pgmb.events (topic, payload) values ('a', '1')")
    dispatch(connection)
    maintain(connection, "1 minute")
    assert one(connection, "select count(*) from pgmb.events") in (0, 1)
    maintain(connection, "2 hours")
    assert one(connection, "select count(*) from pgmb.events") == 0


def test_a_subscription_nobody_listens_to_expires_while_its_group_is_read(connection):
    left = subscribe(connection, "g", "a", expiry_interval="30 seconds")
    used = subscribe(connection, "g", "b", expiry_interval="30 seconds")
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '29 seconds'")
    connection.execute("select * from pgmb.read_next_events('g')")
    connection.execute("update pgmb.subscriptions set last_active_at = now() where id = %s", [used])
    assert lines(connection, "select pgmb.expire_subscriptions(now() + interval '2 seconds')") == [
        "1 subscriptions of group g expired"
    ]
    assert [row[0] for row in connection.execute("select id from pgmb.subscriptions")] == [used] != [left]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_a_time_and_an_interval_make_the_same_time_in_every_session(connection, zone):
    connection.execute("select set_config('timezone', %s, false)", [zone])
    added = "pgmb.add_interval_imm('2024-03-30 12:00+00', '1 day') = timestamptz '2024-03-31 12:00+00'"
    assert one(connection, f"select {added}")
    assert one(connection, "select provolatile from pg_proc where proname = 'add_interval_imm'") == "i"


@pytest.mark.parametrize(
    ("system", "capture", "again"),
    [
        ("pgmb", "select pgmb.push_table_mutations('item')", "select count(*) from pgmb.events"),
        ("revision", "select revision.track('item', '{id}')", "select count(*) from revision.commit_queue"),
    ],
)
def test_writers_go_on_where_a_schema_was_dropped_and_uninstall_takes_what_it_left(
    connection, system, capture, again
):
    connection.execute("create table item (id bigint primary key)")
    connection.execute(capture)
    dropped = {"pgmb": ["pgmb"], "revision": ["pubsub", "revision"]}[system]
    for name in dropped:
        connection.execute(f"drop schema {name} cascade")
    told = []
    connection.add_notice_handler(lambda notice: told.append(notice.message_primary))
    connection.execute("insert into item values (1)")
    assert told == []
    schema.uninstall(connection, dropped)
    assert one(connection, "select count(*) from pg_trigger where tgrelid = 'item'::regclass") == 0
    assert one(connection, "select count(*) from pg_proc where proname like 'pgchange\\_%'") == 0
    connection.execute("delete from pgchange.registered where schema = any (%s)", [dropped])
    schema.install(connection, dropped)
    connection.execute(capture)
    connection.execute("insert into item values (2)")
    assert one(connection, again) == 1
