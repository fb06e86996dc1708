"""Valid events and selections, and ids that contain a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events import Delivery, Event, EventHandlers, Handler, Selection, topical
from airflow_pgchange.events.event import LATEST, event_id, row_of
from airflow_pgchange.events.replay import rewind
from airflow_pgchange.feeds import EventFeed

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def test_ids_are_in_the_order_of_their_times_and_numbers() -> None:
    made = [
        event_id(NOON, 0),
        event_id(NOON, 1),
        event_id(NOON + timedelta(microseconds=1), 0),
        event_id(LATEST, 2**36 - 1),
    ]
    assert made == sorted(made)
    assert {len(one) for one in made} == {24}


def test_a_time_that_no_id_can_say_is_the_first_or_the_last() -> None:
    assert event_id(datetime(1960, 1, 1, tzinfo=UTC), 0) == "pm" + "0" * 22
    assert event_id(datetime(2200, 1, 1, tzinfo=UTC), 0) == event_id(LATEST, 0)


def test_an_id_is_the_same_in_every_time_zone() -> None:
    assert event_id(NOON.astimezone(timezone(timedelta(hours=5, minutes=30))), 7) == event_id(NOON, 7)


def test_a_payload_that_changes_later_changes_nothing() -> None:
    payload = {"n": 1}
    row = row_of(Event("t", payload))
    payload["n"] = 2
    assert row.payload == '{"n":1}'


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topic": ""}, "a topic is"),
        ({"topic": "t" * 256}, "a topic is"),
        ({"topic": "a\0b"}, "a topic is"),
        ({"topic": 5}, "a topic is"),
        ({"topic": "t", "metadata": ["by", "me"]}, "a mapping"),
        ({"topic": "t", "at": datetime(2026, 1, 1)}, "with a zone"),
        ({"topic": "t", "at": datetime(1969, 1, 1, tzinfo=UTC)}, "from 1970"),
        ({"topic": "t", "at": datetime(2200, 1, 1, tzinfo=UTC)}, "from 1970"),
        ({"topic": "t", "at": 1700000000}, "with a zone"),
        ({"topic": "t", "id": "pm1"}, "not the id of an event"),
        ({"topic": "t", "id": 5}, "not the id of an event"),
        ({"topic": "t", "subscription_id": 5}, "id of a subscription"),
        ({"topic": "t", "id": event_id(NOON, 0), "at": NOON}, "either at or id"),
    ],
)
def test_an_invalid_event_is_refused_by_name(given: dict, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Event(**given)


@pytest.mark.parametrize(
    ("what", "value"), [("payload", {1, 2}), ("payload", float("nan")), ("metadata", {"at": NOON})]
)
def test_a_value_that_is_no_json_is_refused_by_name(what: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"the {what} of an event 't' is not JSON"):
        row_of(Event("t", **{what: value}))


@pytest.mark.parametrize(
    "given",
    [
        {"topics": []},
        {"topics": [""]},
        {"topics": "t", "partition": (3, 3)},
        {"topics": "t", "partition": (-1, 3)},
        {"topics": "t", "partition": (0, 0)},
        {"topics": "t", "partition": "0"},
        {"topics": "t", "partition": ("0", "4")},
        {"topics": "t", "partition": (0,)},
        {"topics": "t", "partition": (0.5, 4)},
        {"topics": "t", "partition": (False, 4)},
        {"topics": "t", "partition": (0, 4), "by": 5},
        {"topics": "t", "by": "customer"},
        {"topics": 5},
        {"topics": ["a", None]},
        {"topics": "t", "expiry": 59},
        {"topics": "t", "expiry": "some day"},
        {"topics": "t", "expiry": timedelta()},
        {"topics": "t", "expiry": timedelta(seconds=59)},
        {"topics": "t", "expiry": timedelta.max},
    ],
)
def test_an_invalid_topical_selection_is_refused(given: dict) -> None:
    with pytest.raises(InvalidArgument):
        topical(**given)


def test_the_same_topics_are_the_same_selection_in_any_order() -> None:
    assert topical(["b", "a", "b"]) == topical(["a", "b"])


@pytest.mark.parametrize(
    "params",
    [
        None,
        [1],
        {"a": "\0"},
        {"a": "\ud800"},
        {"\0": 1},
        {"a": float("nan")},
        {"a": object()},
        {"a": 10**5000},
    ],
)
def test_params_that_no_json_can_be_are_refused(params: Any) -> None:
    with pytest.raises(InvalidArgument, match="params"):
        Selection("TRUE", params)


def test_a_backslash_in_params_is_one() -> None:
    assert Selection("TRUE", {"a": "\\u0000"}).params == {"a": "\\u0000"}


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", "x" * 49, None, "a/b"])
def test_an_invalid_name_of_a_group_is_refused(name: Any) -> None:
    for make in (
        EventFeed,
        lambda group: EventHandlers(group, [Handler("h", print)], ""),
        lambda group: rewind("", group, NOON),
    ):
        with pytest.raises(InvalidArgument, match="the name of a group"):
            make(name)


@pytest.mark.parametrize("name", ["", None, "h\0", "h\ud800", "b/c"])
def test_an_invalid_name_of_a_handler_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="the name of a handler"):
        Handler(name, print)


def test_a_handler_that_nobody_would_run_is_refused() -> None:
    def generator(delivery: Delivery) -> Iterator[None]:
        yield

    async def async_generator(delivery: Delivery) -> AsyncIterator[None]:
        yield

    for run in (generator, async_generator):
        with pytest.raises(InvalidArgument, match="without yield"):
            Handler("h", run)


def test_a_condition_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Selection("  ")
