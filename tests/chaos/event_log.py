"""Ten groups of an event log, and a ledger of committed events. The verdict checks that each group had each of its
events once and in order.

Publishers write each event also into ``ledger``, in the same transaction. So the ledger has all published events,
although maintenance drops events that every group has read.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_pgchange.feeds import EventFeed
from tests.chaos.crew import WORK
from tests.chaos.event_publishers import publish
from tests.chaos.event_worker import Consumer, keep, read_by_id_alone
from tests.chaos.harness import SEED, consume_once, one
from tests.chaos.kills import until
from tests.event_keeping import configure, narrow
from tests.events import TOPICAL, subscribe

HALF = "pgmb.event_partition(e.id, 2) = (s.params ->> 'half')::int"
GROUPS: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "everything": [("TRUE", {})],
    "topic a": [(TOPICAL, {"topic": "a"})],
    "topics b and c": [(TOPICAL, {"topic": "b"}), (TOPICAL, {"topic": "c"})],
    "everything and more": [("TRUE", {}), (TOPICAL, {"topic": "a"}), ("e.metadata ? 'kind'", {})],
    "even": [("(e.payload ->> 'n')::int % 2 = 0", {})],
    "half 0": [(HALF, {"half": 0})],
    "half 1": [(HALF, {"half": 1})],
    "late": [("e.metadata ->> 'kind' <> 'plain'", {})],
    "one publisher": [("e.payload ->> 'publisher' = s.params ->> 'of'", {"of": "1"})],
    "direct": [("false", {})],
}
"""The groups with their subscriptions. The conditions overlap."""

TABLES = """
create table ledger (like pgmb.events);
create table naive_reader (group_id text primary key, id text);
"""
RESULTS = """
create table effect (
    n bigint generated always as identity, group_id text, event_id text collate "C", position text collate "C")
"""


def set_up(source: str, results: str) -> None:
    """Create the groups with their subscriptions, the ledger, and partitions of one second with a retention of two
    seconds."""
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(WORK + TABLES)
        for group, subscriptions in GROUPS.items():
            for conditions, params in subscriptions:
                subscribe(connection, group, conditions, params)
        narrow(connection, ahead="3 seconds")
        configure(connection, partition_retention_period="2 seconds")
    with psycopg.connect(results, autocommit=True) as connection:
        connection.execute(RESULTS)


def commit_late(source: str, results: str) -> str:
    """Commit an event only after two groups have read an event with a higher id. Return its id."""
    passed = (
        "select count(distinct group_id) = 2 from effect "
        "where event_id > %s and group_id in ('everything', 'topic a')"
    )
    with psycopg.connect(source) as connection:
        [id] = publish(connection, "late", [{"publisher": "nobody", "n": 0}])
        until(lambda: one(results, passed, id), "a higher id to be read")
    return id


def drain(source: str, results: str, fault: str = "") -> None:
    """Wait until scheduled events are due, and process everything. The consumers have ended."""
    busy = (
        "select exists (select from pg_stat_activity where backend_type = 'client backend' "
        "and datname = current_database() and pid <> pg_backend_pid())"
    )
    for conninfo in (source, results):
        until(lambda conninfo=conninfo: not one(conninfo, busy), "the end of every session")
    until(
        lambda: (
            not one(source, "select exists (select from pgmb.unread_events) or more from pgmb.dispatch()")
        ),
        "the due",
    )
    for group in GROUPS:
        if fault:
            while read_by_id_alone(Consumer(source, results, [group], "", fault=fault), group):
                pass
        else:
            while consume_once(EventFeed(group), results, source, 1000, keep=keep(group)):
                pass


@dataclass(frozen=True)
class Verdict:
    """The errors of a campaign.

    Pairs of group and event are counted that were lost, duplicated, or read although the event was not committed or not
    for the group. Also counted are reads against the order of dispatch or of a publisher, and lost events whose commit
    was acknowledged.
    """

    lost: int = 0
    doubled: int = 0
    strayed: int = 0
    disordered: int = 0
    forgotten: int = 0


RIGHT = Verdict()
EXPECTED = """
select e.id from ledger as e, pgmb.subscriptions as s
where s.id = %s and (e.subscription_id = s.id or e.subscription_id is null and ({conditions}))
"""


def judge(source: str, results: str, acknowledged: Sequence[str]) -> Verdict:
    expected: set[tuple[str, str]] = set()
    with psycopg.connect(source) as connection:
        for sid, group, conditions in connection.execute(
            "select id, group_id, conditions_sql from pgmb.subscriptions where group_id = any (%s)",
            [[*GROUPS]],
        ):
            query = EXPECTED.format(conditions=conditions.replace("%", "%%"))
            expected |= {(group, row[0]) for row in connection.execute(query, [sid])}
        ledger = {
            row[0]: row[1:]
            for row in connection.execute(
                "select id, payload ->> 'publisher', (payload ->> 'n')::int, metadata ->> 'kind' from ledger"
            )
        }
    with psycopg.connect(results) as connection:
        effects = connection.execute("select group_id, event_id, position from effect order by n").fetchall()
    read = [(group, id) for group, id, _ in effects]
    return Verdict(
        lost=len(expected - set(read)),
        doubled=len(read) - len(set(read)),
        strayed=len(set(read) - expected),
        disordered=disordered(effects, ledger),
        forgotten=len(set(acknowledged) - ledger.keys()),
    )


def disordered(effects: Sequence[tuple[str, str, str]], ledger: Mapping[str, tuple[str, int, str]]) -> int:
    """Count how often a group read a lower position, or an earlier event of a publisher, after a higher one."""
    found, positions, numbers = 0, defaultdict[str, str](str), defaultdict[tuple[str, str], int](lambda: -1)
    for group, id, position in effects:
        found += position <= positions[group]
        positions[group] = position
        publisher, number, kind = ledger.get(id, ("", 0, ""))
        if kind in ("plain", "direct", "in a savepoint"):
            found += number <= numbers[group, publisher]
            numbers[group, publisher] = number
    return found


def inversions(results: str, group: str = "everything") -> int:
    """Count how often a group read a lower id after a higher id: a cursor by id alone would have lost these events."""
    with psycopg.connect(results) as connection:
        ids = [
            row[0]
            for row in connection.execute(
                "select event_id from effect where group_id = %s order by n", [group]
            )
        ]
    return sum(id < before for before, id in itertools.pairwise(ids))


def seeded(number: int) -> str:
    return f"{SEED} consumer {number}"
