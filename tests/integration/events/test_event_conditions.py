"""Conditions: who gets which events, and the effect of a condition that fails."""

from __future__ import annotations

import psycopg
import pytest

from tests.events import TOPICAL, drain, faults, poll, poll_all, publish, read, subscribe
from tests.tubes import one


@pytest.mark.parametrize(
    ("conditions", "params", "wanted"),
    [
        ("TRUE", {}, ["a", "b", "c"]),
        (TOPICAL, {"topic": "b"}, ["b"]),
        ("s.params -> 'topics' ? e.topic", {"topics": ["a", "c"]}, ["a", "c"]),
        ("e.topic = 'c' -- a comment", {}, ["c"]),
        ("e.payload ->> 'of' = s.params ->> 'of'", {"of": "b"}, ["b"]),
        ("to_jsonb(e) -> 'payload' ->> 'of' = 'a'", {}, ["a"]),
        ("(e).topic = 'a'", {}, ["a"]),
        ("e.topic = 'a' and e.metadata ? 'nothing'", {}, []),
        ("null", {}, []),
    ],
)
def test_an_event_goes_to_the_subscriptions_whose_condition_is_true(connect, conditions, params, wanted):
    connection = connect()
    subscribe(connection, "g", conditions, params)
    for topic in "abc":
        publish(connection, topic, payload={"of": topic})
    poll_all(connection)
    assert [row["topic"] for row in read(connection)] == wanted


@pytest.mark.parametrize("condition", ["random() < 0.5", "e.topic = 't' and random() < 0.5"])
def test_a_condition_that_draws_lots_draws_one_for_each_event(connect, condition):
    connection = connect()
    subscribe(connection, "g", condition)
    publish(connection, *["t"] * 1000)
    poll_all(connection)
    assert 0 < len(read(connection, "g", 1000)) < 1000


def test_an_event_for_one_subscription_goes_to_that_one_alone(connect):
    connection = connect()
    chosen = subscribe(connection, "g", "false")
    subscribe(connection, "h")
    event = publish(connection, "t", to=chosen)
    other = publish(connection, "t")
    poll_all(connection)
    assert [(row["id"], row["subscription_ids"]) for row in read(connection, "g")] == [(event[0], [chosen])]
    assert [row["id"] for row in read(connection, "h")] == other


def test_a_retry_for_one_subscription_in_the_future_goes_to_that_one_alone(connect):
    connection = connect()
    chosen = subscribe(connection, "g")
    subscribe(connection, "h")
    event = one(
        connection,
        "insert into pgmb.events (id, topic, payload, subscription_id) values "
        "(pgmb.create_event_id(clock_timestamp() + interval '50 ms', 0), 'pgmb-retry', '{}', %s) returning id",
        chosen,
    )
    connection.execute(
        "select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [event]
    )
    poll_all(connection)
    assert ([row["id"] for row in read(connection, "g")], read(connection, "h")) == ([event], [])


def test_an_event_comes_once_to_a_group_with_all_its_subscriptions(connect):
    connection = connect()
    everything = subscribe(connection, "g")
    topical = subscribe(connection, "g", TOPICAL, {"topic": "b"})
    ids = publish(connection, "a", "b", "c")
    poll_all(connection)
    rows = read(connection)
    assert [row["id"] for row in rows] == ids
    assert [sorted(row["subscription_ids"]) for row in rows] == [
        [everything],
        sorted([everything, topical]),
        [everything],
    ]


def test_a_subscription_to_many_topics_gets_them_in_order(connect):
    connection = connect()
    subscribe(connection, "g", "s.params -> 'topics' ? e.topic", {"topics": list("ab")})
    ids = publish(connection, *"abababababab")
    assert drain(connection, chunk=5) == ids


def test_many_events_of_a_group_with_several_subscriptions_come_in_order_in_any_chunks(connect):
    connection = connect()
    subscribe(connection, "g")
    subscribe(connection, "g", TOPICAL, {"topic": "t1"})
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't' || g % 2, to_jsonb(g) from generate_series(1, 2500) as g"
    )
    poll_all(connection)
    ids = [row[0] for row in connection.execute("select id from pgmb.events order by id").fetchall()]
    assert drain(connection, chunk=333) == ids


def test_one_event_that_a_condition_fails_on_does_not_stop_the_others(connect):
    connection = connect()
    bad = subscribe(connection, "g", "(e.payload ->> 'n')::int > 0")
    subscribe(connection, "h")
    ids = [publish(connection, "t", payload={"n": n})[0] for n in (1, 2, "no number", 3)]
    assert poll(connection) == 3 + 4
    assert [row["id"] for row in read(connection, "g")] == [ids[0], ids[1], ids[3]]
    assert [row["id"] for row in read(connection, "h")] == ids
    [(subscription, events, message)] = faults(connection)
    assert (subscription, events) == (bad, [ids[2]])
    assert "no number" in message


def test_of_the_subscriptions_of_one_condition_only_the_failing_ones_miss_the_event(connect):
    connection = connect()
    divided = "e.topic <> '' and 1 / (s.params ->> 'by')::int >= 0"
    for number in range(5):
        subscribe(connection, f"g{number}", divided, {"by": number})
    publish(connection, "a", "b")
    assert poll(connection) == 8
    assert sorted((subscription[:2], len(events)) for subscription, events, _ in faults(connection)) == [
        ("su", 1),
        ("su", 1),
    ]
    assert read(connection, "g0") == []
    assert len(read(connection, "g4")) == 2


def test_a_condition_that_fails_on_everything_loses_nothing_and_a_replay_delivers_it(connect):
    connection = connect()
    connection.execute(
        "create function public.judge(topic text) returns boolean as 'begin return 1 / 0 = 1; end' language plpgsql"
    )
    subscribe(connection, "g", "public.judge(e.payload ->> 'of')")
    subscribe(connection, "h")
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', to_jsonb(g) from generate_series(1, 3000) as g"
    )
    assert poll(connection) == 3000
    assert sum(len(events) for _, events, _ in faults(connection)) == 3000
    connection.execute(
        "create or replace function public.judge(topic text) returns boolean as 'begin return true; end' language plpgsql"
    )
    assert one(connection, "select pgmb.replay_faults('g')") == 3000
    assert [row["payload"] for row in read(connection, "g", 5000)] == list(range(1, 3001))
    assert faults(connection) == []


def test_a_replay_dispatches_a_thousand_events_at_a_time(connect):
    """If it were one large dispatch, a reader of a group with several subscriptions would read all of it for each
    chunk."""
    connection = connect()
    for n in range(2):
        subscribe(connection, "g", "(e.payload ->> 'n')::int > 0", {"n": n})
    connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{\"n\": \"x\"}' from generate_series(1, 2500)"
    )
    poll_all(connection)
    connection.execute("update pgmb.subscriptions set conditions_sql = 'TRUE' where params ->> 'n' = '0'")
    connection.execute(
        "update pgmb.subscriptions set conditions_sql = 'e.topic = ''t''' where params ->> 'n' = '1'"
    )
    assert one(connection, "select pgmb.replay_faults('g')") == 5000
    each = connection.execute(
        "select count(distinct event_id) from pgmb.subscription_events group by left(id, 15) order by left(id, 15)"
    ).fetchall()
    assert [n for (n,) in each] == [1000, 1000, 500]
    behind = publish(connection, "t")
    ids = [row[0] for row in connection.execute("select id from pgmb.events order by id").fetchall()]
    assert drain(connection, chunk=171) == ids
    assert ids[-1:] == behind


@pytest.mark.parametrize(
    "conditions",
    [
        "e.nosuch = 1",
        "true] || array[true",
        "e.topic =",
        "true) or (true",
        "true); drop table pgmb.events; --",
        "select 1",
        "count(*) > 1",
        "exists (select from pgmb.events for update)",
        "",
    ],
)
def test_a_condition_that_does_not_compile_is_refused_with_its_text(unchanged, conditions):
    with pytest.raises(psycopg.DatabaseError, match="cannot be used") as refused:
        subscribe(unchanged, "g", conditions)
    assert refused.value.sqlstate == "PC008"
    assert conditions in str(refused.value)
    assert one(unchanged, "select count(*) from pgmb.subscription_groups") == 0


def test_no_list_of_conditions_is_refused(connect):
    with pytest.raises(psycopg.Error, match="not a list of conditions") as refused:
        connect().execute("select pgmb.prepare_poll_for_events_fn(null)")
    assert refused.value.sqlstate == "PC008"


def test_the_same_condition_and_params_are_one_subscription(connect):
    connection = connect()
    subscribe(connection, "g", TOPICAL, {"topic": "a"})
    with pytest.raises(psycopg.errors.UniqueViolation):
        subscribe(connection, "g", TOPICAL, {"topic": "a"})
    subscribe(connection, "h", TOPICAL, {"topic": "a"})


def test_identities_of_very_many_subscriptions_do_not_collide(connect):
    connection = connect()
    connection.execute(
        "create temporary table many (like pgmb.subscriptions including generated including defaults)"
    )
    # With hashes of 32 bits, about 5 pairs of subscriptions would be equal. The probability of no equal pair is 1 %.
    connection.execute(
        "insert into many (id, group_id, conditions_sql, params, last_active_at, condition_id) "
        "select 'su', 'g', 'TRUE', jsonb_build_object('n', g), now(), 1 from generate_series(1, 200000) as g"
    )
    assert one(connection, "select count(*) - count(distinct identity) from many") == 0


def test_every_event_reaches_one_of_the_partitions_of_a_topic(connect):
    connection = connect()
    for number in range(3):
        subscribe(
            connection,
            f"g{number}",
            "pgmb.event_partition(e.id, 3) = (s.params ->> 'partition')::int",
            {"partition": number},
        )
    ids = publish(connection, *["t"] * 300)
    poll_all(connection)
    got = [[row["id"] for row in read(connection, f"g{number}")] for number in range(3)]
    assert sorted(event for group in got for event in group) == ids
    assert min(map(len, got)) > 50


def test_a_new_subscription_gets_what_is_dispatched_after_it(connect):
    connection = connect()
    subscribe(connection, "old")
    publish(connection, "before")
    poll_all(connection)
    subscribe(connection, "new")
    after = publish(connection, "after")
    poll_all(connection)
    assert [row["id"] for row in read(connection, "new")] == after


def test_events_published_while_nobody_subscribes_are_nobodys(connect):
    connection = connect()
    publish(connection, "a")
    assert poll(connection) == 0
    assert one(connection, "select count(*) from pgmb.unread_events") == 0


def test_a_thousand_subscriptions_of_one_condition_get_each_its_own(connect):
    connection = connect()
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        "select 'g' || g, %s, jsonb_build_object('topic', 't' || g) from generate_series(1, 1000) as g",
        [TOPICAL],
    )
    connection.execute(
        "insert into pgmb.events (topic, payload) "
        "select 't' || 1 + mod(g, 1000), '{}' from generate_series(1, 10000) as g"
    )
    assert poll(connection) == 10000
    assert [row["topic"] for row in read(connection, "g77")] == ["t77"] * 10
    wrong = one(
        connection,
        "select count(*) from pgmb.subscription_events as d join pgmb.events as e on e.id = d.event_id "
        "where 'g' || substr(e.topic, 2) <> d.group_id",
    )
    assert wrong == 0


def test_a_condition_of_a_thousand_subscriptions_is_evaluated_for_those_that_match_and_once_a_topic(connect):
    connection = connect()
    connection.execute("create sequence public.evaluated")
    # The function is stable, so that its result can be looked up in an index.
    connection.execute(
        "create function public.wanted(topic text) returns jsonb stable language plpgsql as "
        "'begin perform nextval(''public.evaluated''); return jsonb_build_object(''topic'', topic); end'"
    )
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        "select 'g' || g, 's.params @> public.wanted(e.topic)', jsonb_build_object('topic', 't' || g) "
        "from generate_series(1, 1000) as g"
    )
    connection.execute(
        "insert into pgmb.events (topic, payload) "
        "select 't' || 1 + mod(g, 10), '{}' from generate_series(1, 1000) as g"
    )
    before = one(connection, "select last_value from public.evaluated")
    assert poll(connection) == 1000
    # For each topic: find its subscription by the index, and evaluate only that subscription.
    assert one(connection, "select last_value from public.evaluated") - before == 2 * 10


def test_a_changed_condition_counts_from_the_next_poll_on(connect):
    connection = connect()
    sid = subscribe(connection, "g", TOPICAL, {"topic": "a"})
    connection.execute("update pgmb.subscriptions set conditions_sql = 'TRUE' where id = %s", [sid])
    ids = publish(connection, "b")
    assert drain(connection) == ids


def test_a_poll_takes_fewer_events_where_very_many_conditions_are_evaluated_for_each(connect):
    connection = connect()
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql) "
        "select 'g' || g, 'FALSE' from generate_series(1, 4000) as g"
    )
    # Subscriptions whose conditions depend on their params are found by an index.
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        "select 'h' || g, %s, jsonb_build_object('topic', 'h' || g) from generate_series(1, 4000) as g",
        [TOPICAL],
    )
    connection.execute("update pgmb.config set value = '80' where id = 'poll_chunk_size'")
    for _ in range(25):
        publish(connection, "t")
    taken = [one(connection, "select events from pgmb.dispatch()") for _ in range(3)]
    assert taken == [20, 5, 0]


@pytest.mark.parametrize("conditions", ["TRUE", TOPICAL, "length(e.topic) = 1"])
def test_a_poll_for_very_many_subscriptions_takes_fewer_events_so_that_their_pairs_fit_into_memory(
    connect, conditions
):
    connection = connect()
    subscribe(connection, "none", TOPICAL, {"topic": "never"})
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        """select 'g' || g, %s, '{"topic": "t"}' from generate_series(1, 100) as g""",
        [conditions],
    )
    connection.execute(
        "create or replace function pgmb.most_pairs() returns bigint language sql immutable as 'select 1000'"
    )
    ids = [publish(connection, "t")[0] for _ in range(25)]
    assert [poll(connection) for _ in range(4)] == [1000, 1000, 500, 0]
    assert [row["id"] for row in read(connection, "g100")] == ids


def test_a_poll_for_many_subscriptions_that_get_little_takes_a_whole_chunk(connect):
    connection = connect()
    connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql, params) "
        "select 'g' || g, %s, jsonb_build_object('topic', 't' || g) from generate_series(1, 100) as g",
        [TOPICAL],
    )
    connection.execute(
        "create or replace function pgmb.most_pairs() returns bigint language sql immutable as 'select 1000'"
    )
    ids = [publish(connection, f"t{number}")[0] for number in range(1, 26)]
    assert [poll(connection) for _ in range(2)] == [25, 0]
    assert [row["id"] for row in read(connection, "g25")] == [ids[-1]]
