"""The state of a cluster, built from its events. Only events change it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from airflow_pgchange.topology.ranges import Range, Ranges

MOST_UNKNOWN = 100
"""Unknown events that are kept: the newest. The count covers all of them."""


@dataclass(frozen=True)
class Instance:
    """A server of the cluster. ``state`` is Online, Offline or Expelled. A field that no event has set is None."""

    uuid: str
    tier: str | None = None
    replicaset: str | None = None
    state: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class Replicaset:
    """Servers that hold the same data. ``master`` is the uuid of the instance that takes writes."""

    uuid: str
    master: str | None = None


class ClusterState:
    """Instances and replicasets by uuid, bucket ranges by tier.

    Bucket changes wait in ``gathered`` until ``rebuild`` merges them into ``buckets``.
    """

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.replicasets: dict[str, Replicaset] = {}
        self.buckets: dict[str, Ranges] = {}
        self.gathered: list[tuple[str, Range]] = []
        self.unknown: deque[str] = deque(maxlen=MOST_UNKNOWN)
        self.unknown_count = 0

    def ranges(self, tier: str) -> Ranges:
        return self.buckets.get(tier, Ranges())

    def home(self, tier: str, bucket: int) -> Replicaset | None:
        """The replicaset that owns a bucket."""
        return self.replicasets.get(self.ranges(tier).owner(bucket) or "")

    def put_replicaset(self, uuid: str, *, master: str | None) -> None:
        old = self.replicasets.get(uuid, Replicaset(uuid))
        self.replicasets[uuid] = old if master is None else replace(old, master=master)

    def remove_replicaset(self, uuid: str) -> None:
        self.replicasets.pop(uuid, None)

    def put_instance(self, uuid: str, **changed: str | None) -> None:
        old = self.instances.get(uuid, Instance(uuid))
        self.instances[uuid] = replace(
            old, **{name: value for name, value in changed.items() if value is not None}
        )

    def remove_instance(self, uuid: str) -> None:
        self.instances.pop(uuid, None)

    def gather(self, tier: str, start: int, end: int, owner: str) -> None:
        self.gathered.append((tier, (start, end, owner)))

    def keep_unknown(self, text: str) -> None:
        self.unknown.append(text)
        self.unknown_count += 1

    def rebuild(self) -> None:
        """Merge the gathered changes into the bucket ranges."""
        changed: dict[str, list[Range]] = {}
        for tier, bucket_range in self.gathered:
            changed.setdefault(tier, []).append(bucket_range)
        for tier, ranges in changed.items():
            self.buckets[tier] = Ranges([*self.ranges(tier), *ranges])
        self.gathered.clear()
