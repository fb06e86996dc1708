"""What clients hear of: a value for each kind of event, which knows how it changes a picture.

A further kind is a class here with ``of`` and ``change``, and a row of ``KINDS``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from airflow_pgchange.topology.cluster_state import ClusterState
from airflow_pgchange.topology.raft import Raft


class Event(Protocol):
    """Something that happened to the catalogue; ``raft`` orders them, ``op`` is replace or delete."""

    @property
    def raft(self) -> Raft: ...

    @property
    def op(self) -> str: ...

    @property
    def timestamp(self) -> str: ...

    def change(self, picture: ClusterState) -> None:
        """Make the picture show it. Doing so twice is as once."""


@dataclass(frozen=True)
class ReplicasetEvent:
    """A replicaset that came, its master, or one that went."""

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
    """An instance that came, its state or address, or one that went. What is None has not changed."""

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
    """A range of buckets, inclusive of both ends, that a replicaset of the tier owns."""

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
    """An event of a kind that is not known here, or not as it should be: kept as it came, and changes nothing."""

    raft: Raft
    op: str
    timestamp: str
    text: str

    def change(self, picture: ClusterState) -> None:
        picture.keep_unknown(self.text)


KINDS: dict[str, Any] = {"replicaset": ReplicasetEvent, "instance": InstanceEvent, "bucket": BucketEvent}
"""Every kind by its name in ``map``."""
OPS = ("replace", "delete")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


def parse(text: str) -> Event | None:
    """The event in a notice; None for a notice that is no event at all."""
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
