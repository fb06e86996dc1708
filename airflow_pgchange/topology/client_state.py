"""A client's copy of the topology, and the queries on it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.topology.cluster_state import ClusterState, Instance, Replicaset
from airflow_pgchange.topology.events import Event
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.ranges import Ranges

NOWHERE = Raft(0, 0)
MOST_REMEMBERED = 10_000
"""Number of past events that ``since`` can return."""


class Topology:
    """The current topology. Applies each event once, even if it arrives several times. No I/O.

    One thread loads, applies and rebuilds; any thread may read. Bucket changes are gathered, so that a burst costs
    little. The bucket map shows them once there are ``gather_count``, or once the first is ``gather_interval`` old.
    """

    def __init__(
        self,
        gather_count: int = 2000,
        gather_interval: Seconds = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.at = NOWHERE
        self._snapshots = 0
        self._gather_count = gather_count
        self._gather_interval = seconds("gather_interval", gather_interval)
        self._clock = clock
        self._gathering_since: float | None = None
        self._picture = ClusterState()
        self._recent: deque[Event] = deque(maxlen=MOST_REMEMBERED)
        self._remembered_from = NOWHERE

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Every instance by its uuid."""
        return dict(self._picture.instances)

    @property
    def replicasets(self) -> Mapping[str, Replicaset]:
        """Every replicaset by its uuid."""
        return dict(self._picture.replicasets)

    @property
    def unknown(self) -> list[str]:
        """The texts of the latest unknown events. ``unknown_count`` counts all of them."""
        return list(self._picture.unknown)

    @property
    def unknown_count(self) -> int:
        return self._picture.unknown_count

    def load(self, snapshot: Iterable[Event]) -> None:
        """Replace everything by a snapshot. Readers see the old or the new topology, never a part."""
        picture, at = ClusterState(), NOWHERE
        for event in snapshot:
            event.change(picture)
            at = max(at, event.raft)
        self._snapshots += 1
        picture.rebuild()
        self._recent.clear()
        self._gathering_since = None
        # Positions of the old topology are now unknown: since() returns None for them.
        self._picture = picture
        self._remembered_from = self.at = self._point(at)

    def apply(self, event: Event) -> bool:
        """Apply an event, unless it or a later event has been applied. Return whether it was applied."""
        if event.raft <= self.at:
            return False
        event.change(self._picture)
        if len(self._recent) == MOST_REMEMBERED:
            self._remembered_from = self._recent[0].raft
        self._recent.append(event)
        self.at = self._point(event.raft)
        if self._picture.gathered and self._gathering_since is None:
            self._gathering_since = self._clock()
        self.rebuild_if_due()
        return True

    def due_in(self) -> float | None:
        """Return the seconds until the gathered bucket changes are due; None if there are none."""
        if self._gathering_since is None:
            return None
        if len(self._picture.gathered) >= self._gather_count:
            return 0.0
        return max(0.0, self._gathering_since + self._gather_interval - self._clock())

    def rebuild_if_due(self) -> bool:
        """Apply the gathered bucket changes to the map if they are due. Return whether they were."""
        if self.due_in() != 0.0:
            return False
        self.rebuild()
        return True

    def rebuild(self) -> None:
        """Apply the gathered bucket changes to the map now."""
        self._picture.rebuild()
        self._gathering_since = None

    def buckets(self, tier: str) -> Ranges:
        """Return the bucket ranges of a tier, each with the uuid of its owning replicaset."""
        return self._picture.ranges(tier)

    def owner(self, tier: str, bucket: int) -> str | None:
        """Return the uuid of the replicaset that owns a bucket; None if the bucket has no owner or its owner is unknown.

        The owner is unknown if the bucket was moving when the snapshot was taken and has not arrived.
        """
        return self.buckets(tier).owner(bucket)

    def master(self, tier: str, bucket: int) -> Instance | None:
        """Return the master of a bucket, whatever its state; None if it is unknown."""
        picture = self._picture
        replicaset = picture.home(tier, bucket)
        return None if replicaset is None else picture.instances.get(replicaset.master or "")

    def replicas(self, tier: str, bucket: int) -> list[Instance]:
        """Return the other instances that hold a bucket, by uuid, whatever their state."""
        picture = self._picture
        replicaset = picture.home(tier, bucket)
        if replicaset is None:
            return []
        members = [each for each in list(picture.instances.values()) if each.replicaset == replicaset.uuid]
        return sorted(
            (each for each in members if each.uuid != replicaset.master), key=lambda each: each.uuid
        )

    def since(self, at: Raft) -> list[Event] | None:
        """Return the events after the position ``at``, in order; None if they are no longer known.

        After None, read the whole topology again. A new snapshot starts a new history: positions of the previous one are
        unknown, even later ones.
        """
        if at.snapshot not in (0, self._snapshots) or not self._remembered_from <= at <= self.at:
            return None
        return [event for event in list(self._recent) if event.raft > at]

    def _point(self, raft: Raft) -> Raft:
        return replace(raft, snapshot=self._snapshots)
