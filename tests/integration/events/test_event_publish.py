"""Publishing and dispatch: nothing is lost, nothing comes twice, and the order is kept."""

from __future__ import annotations

import json
import threading

import psycopg
import pytest

from tests.events import drain, poll, poll_all, publish, publish_at, read, subscribe, take
from tests.tubes import one


def test_events_come_in_the_order_of_their_statement(connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, *"abcdef")
    assert ids == sorted(ids)
    assert drain(connection) == ids


def test_events_of_a_very_large_statement_come_once_and_in_its_order(connect):
    connection = connect()
    subscribe(connection)
    ids = connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 57000) returning id"
    ).fetchall()
    assert drain(connection, chunk=100_000) == [one_id for (one_id,) in ids]


def test_a_poll_says_how_many_pairs_it_dispatched_and_then_that_nothing_is_left(connect):
    connection = connect()
    subscribe(connection, "g")
    subscribe(connection, "h")
    publish(connection, "a", "b", "c")
    assert [poll(connection), poll(connection)] == [6, 0]


def test_a_late_commit_with_an_older_id_is_read(connect):
    connection, late = connect(), connect(autocommit=False)
    subscribe(connection)
    old = publish(late, "late")
    new = publish(connection, "early")
    assert drain(connection) == new
    late.commit()
    assert drain(connection) == old


def test_events_dispatched_after_the_clock_was_set_back_are_read(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "a")
    drain(connection)
    # Pretend that these events were dispatched and read while the clock was an hour ahead.
    ahead = one(connection, "select pgmb.create_event_id(now() + interval '1 hour', 1)")
    connection.execute("update pgmb.dispatcher set last_id = %s", [ahead])
    connection.execute("update pgmb.subscription_groups set last_read_event_id = %s", [ahead])
    ids = publish(connection, "b")
    assert drain(connection) == ids


def test_events_that_the_polling_transaction_publishes_are_not_skipped(connect):
    connection, mixed = connect(), connect(autocommit=False)
    subscribe(connection)
    first = publish(mixed, "first")
    between = publish(connection, "between")
    poll(mixed)
    second = publish(mixed, "second")
    mixed.commit()
    assert sorted(drain(connection)) == sorted(first + between + second)


def test_a_rolled_back_savepoint_publishes_nothing(connect):
    connection, writer = connect(), connect(autocommit=False)
    subscribe(connection)
    kept = publish(writer, "kept")
    with pytest.raises(ZeroDivisionError), writer.transaction():
        publish(writer, "gone")
        raise ZeroDivisionError
    writer.commit()
    assert drain(connection) == kept


def test_a_poll_beside_another_does_nothing_and_does_not_wait(connect):
    connection, other = connect(), connect(autocommit=False)
    subscribe(connection)
    publish(connection, "a")
    assert poll(other) == 1
    assert poll(connection) == 0
    other.rollback()
    assert poll(connection) == 1


def test_an_event_in_the_future_comes_when_its_time_has_come(connect):
    connection = connect()
    subscribe(connection)
    later = publish_at(connection, "now() + interval '1 hour'")
    event = publish_at(connection, "clock_timestamp() + interval '0.3 seconds'")
    connection.execute(
        "select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [event]
    )
    assert drain(connection) == [event]
    assert one(connection, "select array_agg(event_id::text) from pgmb.unread_events") == [later]


def test_a_scheduled_event_committed_after_its_time_is_read(connect):
    connection, late = connect(), connect(autocommit=False)
    subscribe(connection)
    event = publish_at(late, "clock_timestamp() + interval '0.2 seconds'")
    connection.execute(
        "select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [event]
    )
    other = publish_at(connection, "clock_timestamp() + interval '0.1 seconds'")
    connection.execute(
        "select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [other]
    )
    assert drain(connection) == [other]
    late.commit()
    assert drain(connection) == [event]


def test_explicit_ids_older_than_every_partition_are_read(connect):
    connection = connect()
    subscribe(connection)
    event = publish_at(connection, "'2001-01-01'")
    assert drain(connection) == [event]


def test_an_event_beyond_the_last_partition_is_kept_for_its_time(connect):
    connection = connect()
    subscribe(connection)
    event = publish_at(connection, "now() + interval '20 years'")
    assert poll(connection) == 0
    assert one(connection, "select tableoid::regclass::text from pgmb.events where id = %s", event) == (
        "pgmb.events_default"
    )


@pytest.mark.parametrize("time_and_number", ["null, 0", "now(), null"])
def test_an_event_of_no_time_is_refused_and_not_delivered_at_once(unchanged, time_and_number):
    with pytest.raises(psycopg.errors.NotNullViolation):
        unchanged.execute(
            "insert into pgmb.events (id, topic, payload) "
            f"values (pgmb.create_event_id({time_and_number}), 't', '{{}}')"
        )


@pytest.mark.parametrize(
    ("when", "prefix"),
    [("1960-01-01", "0" * 13), ("-infinity", "0" * 13), ("2200-01-01", "f" * 13), ("infinity", "f" * 13)],
)
def test_a_time_that_no_id_can_say_is_the_first_or_the_last(connect, when, prefix):
    """An event for a time in two hundred years is not delivered now."""
    connection = connect()
    assert one(connection, "select pgmb.create_event_id(%s, 0)", when) == f"pm{prefix}{'0' * 9}"
    event = publish_at(connection, f"'{when}'::timestamptz")
    due = one(connection, "select count(*) from pgmb.published where %s = any (ids)", event)
    assert due == (1 if prefix.startswith("0") else 0)


def test_ids_of_one_microsecond_keep_the_order_of_their_session(connect):
    connection = connect()
    subscribe(connection)
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', to_jsonb(g) from generate_series(1, 5000) as g"
    )
    poll_all(connection)
    assert [row["payload"] for row in read(connection, chunk=5000)] == list(range(1, 5001))


def test_a_transaction_larger_than_a_chunk_is_dispatched_in_parts_once(connect):
    connection, other = connect(), connect()
    subscribe(connection)
    connection.execute("update pgmb.config set value = '1000' where id = 'poll_chunk_size'")
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, 5000)"
    )
    found = []
    for _ in range(12):
        poll(connection)
        found += take(connection)
        publish(other, "between")
    found += drain(connection)
    assert len(found) == len(set(found)) == 5012


def test_an_older_transaction_that_polls_leaves_the_rest_of_a_larger_one_to_other_polls(connect):
    connection, older = connect(), connect(autocommit=False)
    subscribe(connection)
    older.execute("select pg_current_xact_id()")
    ids = publish(connection, *["t"] * 300)
    assert one(connection, "select more from pgmb.dispatch(280)")
    assert older.execute("select events, more from pgmb.dispatch(280)").fetchone() == (0, False)
    older.commit()
    assert drain(connection) == ids


def test_a_poll_that_finishes_a_larger_transaction_keeps_to_its_limit(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, *["t"] * 400)
    for _ in range(3):
        publish(connection, *["t"] * 100)
    # A slice has 280 ids at most: the first poll leaves 120 events of the larger transaction.
    polls = [one(connection, "select events from pgmb.dispatch(220)") for _ in range(3)]
    assert polls == [280, 220, 200]


def test_writers_with_gaps_and_rollbacks_lose_and_double_nothing(db, connect):
    connection = connect()
    for number in range(10):
        subscribe(
            connection,
            f"g{number}",
            "s.params @> jsonb_build_object('topic', e.topic)",
            {"topic": f"t{number}"},
        )

    def write(seed: int) -> None:
        with psycopg.connect(db, autocommit=False) as writer:
            for n in range(60):
                topics = [f"t{(seed + n + i) % 10}" for i in range(1 + (seed * 7 + n) % 40)]
                publish(writer, *topics, payload={"of": seed})
                if (seed + n) % 9 == 0:
                    writer.rollback()
                elif (seed + n) % 4:
                    writer.commit()
            writer.commit()

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(6)]
    for writer in writers:
        writer.start()
    found: dict[int, list[str]] = {number: [] for number in range(10)}
    while True:
        over = not any(writer.is_alive() for writer in writers)
        poll_all(connection)
        for number in found:
            found[number] += take(connection, f"g{number}", 37)
        if over and not poll(connection):
            break
    for number, ids in found.items():
        while taken := take(connection, f"g{number}", 1000):
            ids.extend(taken)
        wanted = connection.execute(
            "select id from pgmb.events where topic = %s order by id", [f"t{number}"]
        ).fetchall()
        assert sorted(ids) == [row[0] for row in wanted]


def test_a_transactions_own_order_is_kept_within_a_group(connect):
    connection = connect()
    subscribe(connection)
    with connect(autocommit=False) as writer:
        ids = [publish(writer, "t")[0] for _ in range(300)]
    assert drain(connection, chunk=7) == ids


def test_an_immediate_stop_loses_no_committed_event(own_cluster, own_database):
    with psycopg.connect(own_database, autocommit=True) as connection:
        subscribe(connection)
        before = publish(connection, "a", "b")
        poll(connection)
        after = publish(connection, "c")
    own_cluster.stop("immediate")
    own_cluster.start()
    with psycopg.connect(own_database, autocommit=True) as connection:
        assert drain(connection) == before + after


@pytest.mark.parametrize(
    "given",
    [
        "pm00",
        "xx" + "0" * 22,
        "pm" + "0" * 23,
        "pm" + "z" * 22,
        "pm" + "F" * 22,
        "pm7" + "g" * 21,
        "pm0\n" + "0" * 20,
        "pm\\" + "0" * 21,
        "\\x706d" + "30" * 9,
    ],
)
def test_an_id_of_another_form_is_refused(unchanged, given):
    """An event without a valid time would be scheduled and never be delivered. Other invalid times could not be read."""
    with pytest.raises(
        (psycopg.errors.StringDataRightTruncation, psycopg.errors.CheckViolation),
        match="22_hexadecimal_digits|too long",
    ):
        unchanged.execute(
            "insert into pgmb.events (id, topic, payload) values (default, 't', '{}'), (%s, 't', '{}')",
            [given],
        )
    assert one(unchanged, "select count(*) from pgmb.events") == 0


@pytest.mark.parametrize(
    ("topic", "metadata", "constraint"),
    [
        ("", "{}", "topic_is_not_empty"),
        ("t", "[1]", "metadata_is_an_object"),
        ("t", "null", "metadata_is_an_object"),
    ],
)
def test_an_event_that_readers_could_not_take_is_refused(unchanged, topic, metadata, constraint):
    with pytest.raises(psycopg.errors.CheckViolation, match=constraint):
        unchanged.execute(
            "insert into pgmb.events (topic, payload, metadata) values (%s, '{}', %s)", [topic, metadata]
        )


def test_a_payload_that_is_no_json_is_refused_and_nothing_of_the_statement_is_kept(unchanged):
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        unchanged.execute("insert into pgmb.events (topic, payload) values ('t', '{}'), ('t', '{')")
    assert one(unchanged, "select count(*) from pgmb.unread_events") == 0


def test_a_poll_under_a_stricter_isolation_level_is_refused(connect):
    connection = connect(autocommit=False)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.DatabaseError, match="read committed") as refused:
        poll(connection)
    assert refused.value.sqlstate == "PC007"


def test_no_table_on_the_way_is_unlogged(connect):
    assert (
        one(
            connect(),
            "select count(*) from pg_class where relnamespace = 'pgmb'::regnamespace and relpersistence <> 'p'",
        )
        == 0
    )


def test_polling_stays_cheap_in_pages_while_an_old_snapshot_is_held_open(connect):
    connection, old = connect(), connect(autocommit=False)
    subscribe(connection)
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("select 1")

    def pages() -> int:
        publish(connection, "a")
        plan = one(connection, "explain (analyze, buffers, format json) select pgmb.poll_for_events()")
        top = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
        return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

    pages()
    few = pages()
    for _ in range(200):
        publish(connection, "a")
        poll(connection)
    # If an ANALYZE comes meanwhile, one of the queries is planned again.
    assert min(pages() for _ in range(3)) <= 3 * few
