"""Topology events: a class for each kind. Each event applies itself to a ``ClusterState``.

To add a kind, write a class with ``of`` and ``change``, and add it to ``KINDS``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from airflow_pgchange.topology.cluster_state import ClusterState
from airflow_pgchange.topology.raft import Raft


class Event(Protocol):
    """A change of the catalogue. ``raft`` is its position in the order of events; ``op`` is replace or delete."""

    @property
    def raft(self) -> Raft: ...

    @property
    def op(self) -> str: ...

    @property
    def timestamp(self) -> str: ...

    def change(self, picture: ClusterState) -> None:
        """Apply the event to the state of the cluster. Idempotent."""


@dataclass(frozen=True)
class ReplicasetEvent:
    """A replicaset was added, got another master, or was removed."""

    raft: Raft
    op: str
    timestamp: str
    replicaset_uuid: str
    current_master_uuid: str | None = None

    @classmethod
    def of(cls, raft: Raft, op: str, timestamp: str, data: Mapping[str, Any]) -> ReplicasetEvent:
        return cls(raft, op, timestamp, _text(data, "replicaset_uuid"), _maybe(data, "current_master_uuid"))

    def change(self, picture: ClusterState) -> None:
        if self.op == "delete":
            picture.remove_replicaset(self.replicaset_uuid)
        else:
            picture.put_replicaset(self.replicaset_uuid, master=self.current_master_uuid)


@dataclass(frozen=True)
class InstanceEvent:
    """An instance was added, changed its state or address, or was removed. A field that is None has not changed."""

    raft: Raft
    op: str
    timestamp: str
    instance_uuid: str
    tier: str | None = None
    replicaset_uuid: str | None = None
    current_state: str | None = None
    address: str | None = None

    @classmethod
    def of(cls, raft: Raft, op: str, timestamp: str, data: Mapping[str, Any]) -> InstanceEvent:
        names = ("tier", "replicaset_uuid", "current_state", "address")
        return cls(
            raft, op, timestamp, _text(data, "instance_uuid"), **{name: _maybe(data, name) for name in names}
        )

    def change(self, picture: ClusterState) -> None:
        if self.op == "delete":
            picture.remove_instance(self.instance_uuid)
        else:
            picture.put_instance(
                self.instance_uuid,
                tier=self.tier,
                replicaset=self.replicaset_uuid,
                state=self.current_state,
                address=self.address,
            )


@dataclass(frozen=True)
class BucketEvent:
    """A range of buckets got an owner. ``start`` and ``end`` are both inclusive."""

    raft: Raft
    op: str
    timestamp: str
    tier: str
    state: str
    start: int
    end: int
    current_replicaset_uuid: str

    @classmethod
    def of(cls, raft: Raft, op: str, timestamp: str, data: Mapping[str, Any]) -> BucketEvent:
        start, end = int(data["bucket_id"]["start"]), int(data["bucket_id"]["end"])
        if op != "replace":
            raise ValueError("buckets are never deleted: another replicaset gets them")
        if end < start:
            raise ValueError(f"there are no buckets from {start} to {end}")
        owner = _text(data, "current_replicaset_uuid")
        return cls(raft, op, timestamp, _text(data, "tier"), _text(data, "state"), start, end, owner)

    def change(self, picture: ClusterState) -> None:
        picture.gather(self.tier, self.start, self.end, self.current_replicaset_uuid)


@dataclass(frozen=True)
class UnknownEvent:
    """An event of an unknown kind, or a malformed event. Its text is kept; it changes no topology."""

    raft: Raft
    op: str
    timestamp: str
    text: str

    def change(self, picture: ClusterState) -> None:
        picture.keep_unknown(self.text)


KINDS: dict[str, Any] = {"replicaset": ReplicasetEvent, "instance": InstanceEvent, "bucket": BucketEvent}
"""The event classes by the event's field ``map``."""
OPS = ("replace", "delete")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def parse(text: str) -> Event | None:
    """Parse the text of a notice. Returns None if it is not an event, and UnknownEvent if its kind is unknown."""
    try:
        data = json.loads(text)
        raft = Raft(int(data["raft"]["term"]), int(data["raft"]["index"]))
        op, timestamp = str(data["op"]), str(data.get("timestamp", ""))
    except MALFORMED:
        return None
    kind = KINDS.get(str(data.get("map")))
    if kind is None or op not in OPS:
        return UnknownEvent(raft, op, timestamp, text)
    try:
        event: Event = kind.of(raft, op, timestamp, data)
    except MALFORMED:
        return UnknownEvent(raft, op, timestamp, text)
    return event


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text")
    return value


def _maybe(data: Mapping[str, Any], name: str) -> str | None:
    return None if data.get(name) is None else _text(data, name)
