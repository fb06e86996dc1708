"""The relay and clients that lag, or whose snapshot lacked buckets, without a network."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest

from airflow_pgchange.errors import HistoryTrimmed
from airflow_pgchange.topology import relay as relays
from airflow_pgchange.topology.catalogue import Catalogue, Lacking, LackingProgress, Logged, Snapshot, Term
from airflow_pgchange.topology.connection import Connection, Limits
from airflow_pgchange.topology.protocol import Session
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.relay import Relay
from tests.unit.test_topology_connection import Transport, startup

AT_ONCE = 10
LIMITS = Limits(backlog_bytes=500)


class Log(Catalogue):
    """A catalogue that is a list of numbered events. The first of them may be trimmed."""

    def __init__(self):
        self.last = 0
        self.trimmed = 0
        self.lacking = None
        self.seen = None
        self.read = []

    async def connect(self):
        return Term(1, 1, 1, datetime.now(UTC), 1, 1)

    async def now(self):
        return Raft(1, self.last)

    async def snapshot(self):
        return Snapshot(Raft(1, self.last), self.lacking, [])

    async def progress_of(self, lacking):
        return self.seen

    async def events(self, after):
        self.read.append(after.index)
        if after.index < self.trimmed:
            raise HistoryTrimmed("trimmed")
        numbers = range(after.index + 1, min(self.last, after.index + AT_ONCE) + 1)
        return [Logged(Raft(1, number), json.dumps({"number": number})) for number in numbers]


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(relays, "MOST_EVENTS", AT_ONCE)
    monkeypatch.setattr(relays, "PAUSE", 0)
    return Log()


@pytest.fixture
async def relay(log):
    made = Relay(log, None, limits=LIMITS)
    await made._begin(await log.connect())
    return made


async def client(relay, number):
    """Return a client that has received its snapshot."""
    made = Transport()
    made.protocol = Connection(number, Session(number, None), relay, LIMITS, None)
    made.protocol.connection_made(made)
    made.protocol.data_received(startup(user="ann", smart_connector="0.1"))
    await relay._round()
    return made


async def rounds(relay, number):
    for _ in range(number):
        await relay._round()


def heard(transport):
    return [int(number) for number in re.findall(rb'"number": (\d+)', b"".join(transport.written))]


def wait_for(transport):
    return sum(len(piece) for piece, _ in transport.protocol._pieces)


async def test_a_client_that_is_slower_than_a_burst_gets_all_of_it_and_delays_no_other(relay, log):
    slow, quick = await client(relay, 1), await client(relay, 2)
    slow.full = True
    log.last = 1000
    # The number of rounds depends only on reading the log. No round waits for a client that lags.
    most = 0
    for _ in range(1000 // AT_ONCE):
        await relay._round()
        most = max(most, wait_for(slow))
    assert heard(quick) == list(range(1, 1001))
    # The limit is the number of bytes that may wait for a client, plus the events that are read at once.
    assert 0 < most < LIMITS.backlog_bytes + AT_ONCE * 100
    while slow.protocol.progress < Raft(1, 1000) or wait_for(slow):
        slow.protocol.resume_writing()
        await relay._round()
        assert wait_for(slow) < LIMITS.backlog_bytes + AT_ONCE * 100
    assert heard(slow) == list(range(1, 1001))
    slow.full = False
    slow.protocol.resume_writing()
    log.last = 1001
    await relay._round()
    assert heard(slow)[-1] == heard(quick)[-1] == 1001
    assert not slow.closed


async def test_of_many_slow_clients_each_hears_everything_once_and_the_log_is_not_read_for_each(relay, log):
    slow = [await client(relay, number) for number in range(50)]
    for one in slow:
        one.full = True
    log.last = 300
    await rounds(relay, 40)
    log.read.clear()
    for one in slow:
        one.full = False
        one.protocol.resume_writing()
    await rounds(relay, 40)
    assert all(heard(one) == list(range(1, 301)) for one in slow)
    # Each round reads new events, and at most once more the events for all clients that lag.
    assert sum(index < 300 for index in log.read) <= 300 // AT_ONCE


async def test_a_client_that_reads_nothing_causes_no_reading_of_the_log(relay, log):
    slow, _ = await client(relay, 1), await client(relay, 2)
    slow.full = True
    log.last = 300
    await rounds(relay, 40)
    log.read.clear()
    await rounds(relay, 10)
    assert log.read == [300] * 10
    assert not slow.closed


async def test_whose_part_of_the_log_was_trimmed_before_it_could_take_it_is_sent_to_a_new_snapshot(
    relay, log
):
    slow, quick = await client(relay, 1), await client(relay, 2)
    slow.full = True
    log.last = 300
    await rounds(relay, 40)
    log.trimmed = 250
    slow.full = False
    slow.protocol.resume_writing()
    await rounds(relay, 2)
    assert slow.closed
    assert b"a new snapshot has what they said" in slow.written[-1]
    assert not quick.closed


@pytest.mark.parametrize(("arrived", "settled"), [(True, True), (True, False), (False, True)])
async def test_a_client_is_let_go_at_once_when_buckets_that_it_lacks_have_arrived_and_no_others_move(
    relay, log, arrived, settled
):
    log.lacking = Lacking('{"default": "{[0,10)}"}', Raft(1, 0))
    log.seen = LackingProgress(log.lacking, arrived=False, settled=False)
    lacks = await client(relay, 1)
    log.seen = LackingProgress(log.lacking, arrived, settled)
    await relay._refresh()
    assert lacks.closed == (arrived and settled)
