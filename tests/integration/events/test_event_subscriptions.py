"""The delivery of events: topics, parts that together get every event, direct messages, expiry."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import psycopg
import pytest
from psycopg.rows import dict_row

from airflow_pgchange.admin import dead_letters, schema, versions
from airflow_pgchange.errors import InvalidArgument, PermissionDenied, Refused
from airflow_pgchange.events import (
    Event,
    Handler,
    Selection,
    heartbeat,
    publish,
    subscribe,
    topical,
    unsubscribe,
)
from tests.handling import failing, group


@pytest.mark.parametrize("column", ["tableoid", "xmin", "ctid"])
def test_a_condition_on_what_an_event_has_not_is_refused(connection, column):
    with pytest.raises(Refused, match=f"column e.{column} does not exist"):
        subscribe(connection, "g", Selection(f"e.{column} is not null"))


def read(connection, group):
    """Return (topic, payload, subscriptions) of the events that a group has not read, in order."""
    connection.execute("select pgmb.poll_for_events()")
    return connection.execute(
        "select topic, payload, subscription_ids::text[] from pgmb.read_next_events(%s, peek => true)",
        [group],
    ).fetchall()


def topics(connection, group):
    return [topic for topic, _, _ in read(connection, group)]


def test_a_subscription_gets_the_events_of_its_topics_and_no_others(connection):
    subscribe(connection, "g", topical(["a", "b"]))
    publish(connection, [Event("a"), Event("c"), Event("b"), Event("A"), Event("ab")])
    assert topics(connection, "g") == ["a", "b"]


def test_without_a_selection_a_group_gets_everything(connection):
    subscribe(connection, "g")
    publish(connection, [Event("a"), Event("b")])
    assert topics(connection, "g") == ["a", "b"]


def test_the_same_selection_twice_is_one_subscription(connection):
    first = subscribe(connection, "g", topical(["a", "b"]))
    assert subscribe(connection, "g", topical(["b", "a"])) == first
    assert subscribe(connection, "h", topical(["a", "b"])) != first
    publish(connection, Event("a"))
    assert [ids for _, _, ids in read(connection, "g")] == [[first]]


def test_conditions_may_be_any_sql_over_event_and_subscription(connection):
    cheap = Selection("(e.payload ->> 'price')::numeric < (s.params ->> 'below')::numeric", {"below": 10})
    subscribe(connection, "g", cheap)
    publish(connection, [Event("t", {"price": price}) for price in (5, 15, 9.5)])
    assert [payload["price"] for _, payload, _ in read(connection, "g")] == [5, 9.5]


def test_a_condition_that_postgresql_does_not_take_is_refused_with_the_reason(connection):
    with pytest.raises(Refused, match="nonsense"):
        subscribe(connection, "g", Selection("e.nonsense = 1"))


@pytest.mark.parametrize("group", ["", "g" * 49])
def test_an_invalid_name_of_a_group_is_refused(connection, group):
    with pytest.raises(InvalidArgument, match="name of a group"):
        subscribe(connection, group)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_together_get_every_event_once(connection, parts):
    for part in range(parts):
        subscribe(connection, f"g{part}", topical("t", partition=(part, parts)))
    publish(connection, [Event("t", {"n": n}) for n in range(2000)] + [Event("other")])
    got = [[payload["n"] for _, payload, _ in read(connection, f"g{part}")] for part in range(parts)]
    assert sorted(n for part in got for n in part) == list(range(2000))
    assert min(map(len, got)) > 2000 / parts / 2
    assert all(part == sorted(part) for part in got)


def test_events_of_one_customer_go_to_one_part_in_order(connection):
    for part in range(3):
        subscribe(connection, f"g{part}", topical("t", partition=(part, 3), by="customer"))
    publish(
        connection,
        [Event("t", {"customer": f"c{n % 20}", "n": n}) for n in range(400)] + [Event("t", {"n": 400})],
    )
    home: dict[str, set[int]] = {}
    numbers: Counter[int] = Counter()
    for part in range(3):
        seen = [payload for _, payload, _ in read(connection, f"g{part}")]
        numbers.update(payload["n"] for payload in seen)
        assert [payload["n"] for payload in seen] == sorted(payload["n"] for payload in seen)
        for payload in seen:
            home.setdefault(payload.get("customer"), set()).add(part)
    assert numbers == Counter(range(401))
    assert {len(parts) for parts in home.values()} == {1}


def test_a_direct_message_reaches_its_subscription_alone(connection):
    mine = subscribe(connection, "g", topical("a"))
    subscribe(connection, "h")
    publish(connection, Event("hello", {"n": 1}, subscription_id=mine))
    assert read(connection, "g") == [("hello", {"n": 1}, [mine])]
    assert read(connection, "h") == []


def test_a_connection_that_makes_dicts_of_its_rows_serves_as_well(bare_db):
    with psycopg.connect(bare_db, autocommit=True, row_factory=dict_row) as connection:
        assert schema.install(connection, ["pgmb"]) == versions.installed(connection)
        mine = subscribe(connection, "g", topical("a"))
        [made] = publish(connection, Event("a", {"n": 1}), returning=True)
        assert heartbeat(connection, "g") == 0
        group(bare_db, Handler("bad", failing(1), retries=())).run("empty")
        [letter] = dead_letters.letters(connection)
        assert dead_letters.redrive(connection, ids=[letter.id]) == [letter.id]
        group(bare_db, Handler("bad", failing(1), retries=())).run("empty")
        assert dead_letters.drop_letters(connection, consumer="events:g/bad") == [letter.id + 1]
        assert (made[:2], unsubscribe(connection, mine)) == ("pm", True)


def test_a_removed_subscription_gets_no_more_events(connection):
    mine = subscribe(connection, "g", topical("a"))
    subscribe(connection, "g", topical("b"))
    assert unsubscribe(connection, mine)
    assert not unsubscribe(connection, mine)
    publish(connection, [Event("a"), Event("b"), Event("c", subscription_id=mine)])
    assert topics(connection, "g") == ["b"]


def test_a_subscription_that_nobody_uses_expires_and_one_in_use_does_not(connection):
    brief = timedelta(minutes=10)
    subscribe(connection, "used", topical("a", expiry=brief))
    subscribe(connection, "idle", topical("a", expiry=brief))
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '11 minutes'")
    assert heartbeat(connection, "used") == 1
    assert heartbeat(connection, "used") == 0
    connection.execute("select pgmb.expire_subscriptions()")
    assert connection.execute("select group_id from pgmb.subscriptions").fetchall() == [("used",)]


def test_subscribing_again_keeps_a_subscription_alive(connection):
    mine = subscribe(connection, "g", topical("a", expiry=timedelta(minutes=10)))
    connection.execute("update pgmb.subscriptions set last_active_at = now() - interval '11 minutes'")
    assert subscribe(connection, "g", topical("a", expiry=timedelta(minutes=10))) == mine
    connection.execute("select pgmb.expire_subscriptions()")
    assert connection.execute("select count(*) from pgmb.subscriptions").fetchone() == (1,)


@pytest.mark.parametrize("selection", [topical("a"), topical("a", partition=(0, 2))], ids=["whole", "part"])
def test_a_role_that_may_not_add_conditions_may_subscribe_to_topics(connection, role, selection):
    """Every database knows the conditions of topical()."""
    other = role("subscriber")
    connection.execute("select pgmb.grant_subscriber(%s::regrole)", [other.name])
    with psycopg.connect(other.conninfo, autocommit=True) as limited:
        subscribe(limited, "g", selection)
        with pytest.raises(PermissionDenied, match="not in pgmb.condition"):
            subscribe(limited, "g", Selection("e.topic = 'a'"))


@pytest.mark.parametrize(
    "query",
    [
        "insert into pgmb.subscriptions (group_id) values ('a/b')",
        "update pgmb.subscriptions set group_id = 'a/b'",
        "select pgmb.make_group('a/b')",
        "select pgmb.register('a/b')",
    ],
)
def test_no_group_has_a_name_that_could_be_anothers_handler(connection, query):
    """The dead letters of both would have the same consumer name, such as events:a/b."""
    subscribe(connection, "a")
    with pytest.raises(psycopg.Error, match="slash"):
        connection.execute(query)
    assert connection.execute("select id from pgmb.subscription_groups").fetchall() == [("a",)]
