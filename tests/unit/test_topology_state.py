"""The guarantees of a client's copy of a topology, for any events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_pgchange.topology import BucketEvent, Raft, Topology, UnknownEvent
from airflow_pgchange.topology.events import KINDS, parse
from airflow_pgchange.topology.ranges import Ranges

NUMBERS = st.integers(0, 40)
RANGES = st.builds(
    lambda a, b, owner: (min(a, b), max(a, b), owner), NUMBERS, NUMBERS, st.sampled_from(["ra", "rb", "rc"])
)


def event(index, map, op="replace", term=1, **fields):
    raft = {"term": term, "index": index}
    return parse(json.dumps({"op": op, "map": map, "timestamp": "", "raft": raft, **fields}))


def bucket(index, start, end, owner, tier="default"):
    fields = {"tier": tier, "state": "copied", "bucket_id": {"start": start, "end": end}}
    return event(index, "bucket", current_replicaset_uuid=owner, **fields)


def snapshot(at=1):
    return [
        event(at, "replicaset", replicaset_uuid="ra", current_master_uuid="a1"),
        event(at, "instance", instance_uuid="a1", replicaset_uuid="ra", tier="default", address="h:1"),
        event(at, "instance", instance_uuid="a2", replicaset_uuid="ra", tier="default", address="h:2"),
        bucket(at, 0, 99, "ra"),
    ]


def shown(topology):
    return topology.instances, topology.replicasets, list(topology.buckets("default"))


CHANGES = st.one_of(
    st.builds(
        lambda who, state: {"map": "instance", "instance_uuid": who, "current_state": state},
        st.sampled_from(["a1", "a2", "a3"]),
        st.sampled_from(["Online", "Offline"]),
    ),
    st.builds(
        lambda who: {"map": "instance", "op": "delete", "instance_uuid": who}, st.sampled_from(["a1", "a3"])
    ),
    st.builds(
        lambda who: {"map": "replicaset", "replicaset_uuid": "ra", "current_master_uuid": who},
        st.sampled_from(["a1", "a2"]),
    ),
    st.builds(
        lambda one: {
            "map": "bucket",
            "tier": "default",
            "state": "copied",
            "bucket_id": {"start": one[0], "end": one[1]},
            "current_replicaset_uuid": one[2],
        },
        RANGES,
    ),
    st.just({"map": "weather"}),
)


@given(st.lists(RANGES, max_size=30))
def test_of_overlapping_ranges_the_later_one_counts(ranges):
    owners = dict.fromkeys(range(41))
    for start, end, owner in ranges:
        owners.update(dict.fromkeys(range(start, end + 1), owner))
    made = Ranges(ranges)
    assert {number: made.owner(number) for number in owners} == owners
    assert all(one[1] < other[0] for one, other in zip(list(made), list(made)[1:], strict=False))


@given(st.lists(CHANGES, max_size=20), st.data())
def test_stale_and_repeated_events_change_nothing(changes, data):
    events = [event(2 + number, **change) for number, change in enumerate(changes)]
    once, often = Topology(), Topology()
    for topology in (once, often):
        topology.load(snapshot())
    for place, one in enumerate(events):
        assert once.apply(one)
        often.apply(one)
        for old in data.draw(st.lists(st.sampled_from(events[: place + 1]), max_size=3)):
            assert not often.apply(old)
    once.rebuild()
    often.rebuild()
    assert shown(once) == shown(often)
    assert once.unknown_count == often.unknown_count == sum(c["map"] == "weather" for c in changes)


def test_a_later_term_is_later_whatever_its_index():
    topology = Topology()
    topology.load(snapshot(at=105))
    assert topology.apply(event(42, "instance", term=2, instance_uuid="a1", current_state="Offline"))
    assert not topology.apply(event(900, "instance", term=1, instance_uuid="a1", current_state="Online"))
    assert topology.instances["a1"].state == "Offline"


def test_a_new_snapshot_replaces_all_even_by_an_older_one():
    topology = Topology()
    topology.load(snapshot(at=9))
    topology.apply(event(10, "instance", instance_uuid="gone", tier="default"))
    topology.load(snapshot(at=3))
    assert set(topology.instances) == {"a1", "a2"}
    assert topology.at == Raft(1, 3)


def test_another_thread_that_sees_a_point_sees_the_picture_of_that_point():
    seen = []

    class Watched(Topology):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "at" and value.index:
                seen.append(set(self.instances))

    topology = Watched()
    topology.load(snapshot())
    topology.apply(event(2, "instance", instance_uuid="a3"))
    topology.load(snapshot(at=3))
    assert seen == [{"a1", "a2"}, {"a1", "a2", "a3"}, {"a1", "a2"}]


def test_it_answers_where_a_bucket_is_written_and_where_it_is_read():
    topology = Topology()
    topology.load(snapshot())
    assert topology.master("default", 42).address == "h:1"
    assert [one.address for one in topology.replicas("default", 42)] == ["h:2"]
    topology.apply(event(2, "replicaset", replicaset_uuid="ra", current_master_uuid="a2"))
    assert topology.master("default", 42).address == "h:2"
    assert [one.address for one in topology.replicas("default", 42)] == ["h:1"]


@pytest.mark.parametrize(("tier", "number"), [("default", 100), ("other", 1)])
def test_it_answers_nothing_for_buckets_that_nobody_has(tier, number):
    topology = Topology()
    topology.load(snapshot())
    assert topology.owner(tier, number) is None
    assert topology.master(tier, number) is None
    assert topology.replicas(tier, number) == []


def test_bucket_changes_are_gathered_until_there_are_enough():
    topology = Topology(gather_count=3)
    topology.load(snapshot())
    for index in (2, 3):
        topology.apply(bucket(index, index, index, "rb"))
    assert topology.owner("default", 2) == "ra"
    topology.apply(bucket(4, 4, 4, "rb"))
    assert [topology.owner("default", number) for number in (1, 2, 3, 4)] == ["ra", "rb", "rb", "rb"]
    assert topology.due_in() is None


def test_bucket_changes_are_gathered_until_the_first_is_old_enough():
    now = [100.0]
    topology = Topology(gather_interval=15, clock=lambda: now[0])
    topology.load(snapshot())
    topology.apply(bucket(2, 0, 9, "rb"))
    now[0] += 14
    topology.apply(bucket(3, 20, 29, "rb"))
    assert topology.due_in() == 1
    assert not topology.rebuild_if_due()
    now[0] += 1
    assert topology.rebuild_if_due()
    assert [topology.owner("default", number) for number in (5, 15, 25)] == ["rb", "ra", "rb"]


def test_what_changed_since_is_told_until_a_new_snapshot():
    topology = Topology()
    topology.load(snapshot())
    at = topology.at
    one = event(2, "instance", instance_uuid="a1", current_state="Offline")
    topology.apply(one)
    assert topology.since(at) == [one]
    assert topology.since(topology.at) == []
    topology.load(snapshot(at=3))
    assert topology.since(at) is None


@pytest.mark.parametrize("at", [9, 5])
def test_behind_a_new_snapshot_of_the_same_or_an_earlier_point_everything_is_looked_at_anew(at):
    topology = Topology()
    topology.load(snapshot(at=8))
    topology.apply(event(9, "instance", instance_uuid="a1", current_state="Offline"))
    before = topology.at
    topology.load(snapshot(at=at))
    assert topology.since(before) is None
    assert topology.since(topology.at) == []


def test_what_changed_longer_ago_than_is_remembered_is_not_known():
    topology = Topology()
    topology.load(snapshot())
    for index in range(2, 10_003):
        topology.apply(event(index, "instance", instance_uuid="a1", current_state="Offline"))
    assert topology.since(Raft(1, 1)) is None
    assert len(topology.since(Raft(1, 2))) == 10_000


@pytest.mark.parametrize(
    "fields",
    [
        {"map": "weather", "sun": True},
        {"map": "bucket", "tier": "default"},
        {
            "map": "bucket",
            "tier": "t",
            "state": "s",
            "bucket_id": {"start": 2, "end": 1},
            "current_replicaset_uuid": "r",
        },
        {"map": "instance", "instance_uuid": 7},
        {"map": None},
        {"map": "instance", "op": "merge", "instance_uuid": "a1"},
        {
            "map": "bucket",
            "op": "delete",
            "tier": "default",
            "state": "active",
            "bucket_id": {"start": 1, "end": 2},
            "current_replicaset_uuid": "rb",
        },
        {
            "map": "bucket",
            "tier": "default",
            "state": "copied",
            "bucket_id": {"start": 1, "end": float("inf")},
            "current_replicaset_uuid": "rb",
        },
    ],
)
def test_an_unknown_event_is_kept_counted_and_harmless(fields):
    topology = Topology()
    topology.load(snapshot())
    before = shown(topology)
    one = event(2, **fields)
    assert isinstance(one, UnknownEvent)
    assert topology.apply(one)
    topology.rebuild()
    assert shown(topology) == before
    assert (topology.unknown, topology.unknown_count) == ([one.text], 1)


def test_a_further_kind_is_one_class_and_one_row(monkeypatch):
    class Tier(UnknownEvent):
        @classmethod
        def of(cls, raft, op, timestamp, data):
            return cls(raft, op, timestamp, data["tier"])

    monkeypatch.setitem(KINDS, "tier", Tier)
    assert event(2, "tier", tier="hot") == Tier(Raft(1, 2), "replace", "", "hot")


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_a_notice_that_is_no_event_is_none(text):
    assert parse(text) is None


def test_an_event_that_is_nowhere_in_history_is_none():
    assert event(float("inf"), "instance", instance_uuid="a1") is None


def test_a_range_is_inclusive_of_both_ends():
    assert bucket(1, 3, 3, "ra") == BucketEvent(Raft(1, 1), "replace", "", "default", "copied", 3, 3, "ra")


def test_a_place_in_the_history_counts_by_term_and_index_alone_and_is_of_no_snapshot_by_itself():
    assert Raft(1, 9).snapshot == 0
    assert Raft(1, 9) == Raft(1, 9, 7)
    assert Raft(1, 9) < Raft(2, 0)
