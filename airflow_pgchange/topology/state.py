"""What a client knows of the topology, and what it answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from airflow_pgchange.feeds.checks import Seconds, seconds
from airflow_pgchange.topology.cluster_state import ClusterState, Instance, Replicaset
from airflow_pgchange.topology.events import Event
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.ranges import Ranges

NOWHERE = Raft(0, 0)
MOST_REMEMBERED = 10_000
"""Events that ``since`` can tell."""


class Topology:
    """Applies events, each once however often it comes, and answers questions; no I/O.

    One thread applies and rebuilds, any may ask. Changes of buckets are gathered: the map shows them once there are
    ``gather_count`` of them or the first is ``gather_interval`` old, whichever is first, so that a burst costs little.
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
        """The latest events of kinds that are not known here, as they came; ``unknown_count`` counts all."""
        return list(self._picture.unknown)

    @property
    def unknown_count(self) -> int:
        return self._picture.unknown_count

    def load(self, snapshot: Iterable[Event]) -> None:
        """Forget everything and believe a whole snapshot, at once: nobody sees a part of it."""
        picture, at = ClusterState(), NOWHERE
        for event in snapshot:
            event.change(picture)
            at = max(at, event.raft)
        self._snapshots += 1
        picture.rebuild()
        self._recent.clear()
        self._gathering_since = None
        # Whoever has seen the old picture asks from an older point, and is told to look at everything anew.
        self._picture = picture
        self._remembered_from = self.at = self._point(at)

    def apply(self, event: Event) -> bool:
        """Show one event, unless it or a later one has been shown; whether it was news."""
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
        """Seconds until gathered changes of buckets are due; None where there are none."""
        if self._gathering_since is None:
            return None
        if len(self._picture.gathered) >= self._gather_count:
            return 0.0
        return max(0.0, self._gathering_since + self._gather_interval - self._clock())

    def rebuild_if_due(self) -> bool:
        """Let the map show what was gathered, if it is due."""
        if self.due_in() != 0.0:
            return False
        self.rebuild()
        return True

    def rebuild(self) -> None:
        """Let the map show what was gathered, now."""
        self._picture.rebuild()
        self._gathering_since = None

    def buckets(self, tier: str) -> Ranges:
        """The ranges of a tier, each with the uuid of the replicaset that owns it."""
        return self._picture.ranges(tier)

    def owner(self, tier: str, bucket: int) -> str | None:
        """The uuid of the replicaset that owns a bucket; None where it is on its way, or nobody's."""
        return self.buckets(tier).owner(bucket)

    def master(self, tier: str, bucket: int) -> Instance | None:
        """The instance that a bucket is written to, whatever its state; None where it is not known."""
        picture = self._picture
        replicaset = picture.home(tier, bucket)
        return None if replicaset is None else picture.instances.get(replicaset.master or "")

    def replicas(self, tier: str, bucket: int) -> list[Instance]:
        """The other instances that hold a bucket, in order of their uuid, whatever their state."""
        picture = self._picture
        replicaset = picture.home(tier, bucket)
        if replicaset is None:
            return []
        members = [one for one in list(picture.instances.values()) if one.replicaset == replicaset.uuid]
        return sorted((one for one in members if one.uuid != replicaset.master), key=lambda one: one.uuid)

    def since(self, at: Raft) -> list[Event] | None:
        """What has happened behind ``at``, in order; None where that is not known any more: look at everything anew.

        A new snapshot begins a new history: a point of the one before is not known, even where it is a later one.
        """
        if at.snapshot not in (0, self._snapshots) or not self._remembered_from <= at <= self.at:
            return None
        return [event for event in list(self._recent) if event.raft > at]

    def _point(self, raft: Raft) -> Raft:
        return replace(raft, snapshot=self._snapshots)
