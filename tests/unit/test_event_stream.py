"""Places in a group's order, and the buffered events of a client."""

from __future__ import annotations

import pytest

from airflow_pgchange.events.stream import Client, StreamPosition, message

FIRST, SECOND = (f"pm{n:022x}" for n in (1, 2))


@pytest.mark.parametrize(
    "position",
    [StreamPosition("", seen=5), StreamPosition(FIRST, seen=2**51), StreamPosition(FIRST, SECOND, 7)],
    ids=str,
)
def test_a_position_is_what_its_text_says(position):
    read = StreamPosition.parse(str(position))
    assert (read, read.seen) == (position, position.seen)


def test_a_slice_is_behind_its_events_and_before_those_of_the_next():
    positions = [
        StreamPosition(""),
        StreamPosition(FIRST, FIRST),
        StreamPosition(FIRST, SECOND),
        StreamPosition(FIRST),
        StreamPosition(SECOND, FIRST),
    ]
    assert sorted({*positions}) == positions


async def test_events_that_a_client_had_from_another_process_are_left_out():
    client = Client("su", StreamPosition(FIRST, FIRST), 1000)
    for position in (StreamPosition(FIRST, FIRST), StreamPosition(FIRST, SECOND)):
        client.put(position, message(position, "{}"))
    client.end()
    assert await client.next(1) == message(StreamPosition(FIRST, SECOND), "{}")
    assert await client.next(1) is None


async def test_an_event_that_is_larger_than_the_buffer_goes_alone():
    client = Client("su", StreamPosition(""), 10)
    client.put(StreamPosition(FIRST, FIRST), b"x" * 100)
    assert await client.next(1) == b"x" * 100
    assert not client.ended


async def test_what_has_no_room_drops_the_client_and_what_waits():
    client = Client("su", StreamPosition(""), 10)
    client.put(StreamPosition(FIRST, FIRST), b"x" * 6)
    client.put(StreamPosition(FIRST, SECOND), b"x" * 6)
    last = await client.next(1)
    assert last is not None
    assert last.startswith(b"event: dropped\ndata: ")
    assert await client.next(1) is None
