"""Control pods, and who is asked what to give up for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Control:
    """A control pod whose turn has come: all that was touched in its shard before it is done.

    ``backfill_end``: of ``table`` the downstream gives up what it has not written since ``start_seq``. ``truncate``: all
    that it had of ``table`` before ``seq``; of several whose turn has come it is asked for the last. Any other ``type``
    is a user's own, and means what its ``payload`` says.
    """

    seq: int
    shard: int
    type: str
    table: str
    start_seq: int | None = None
    payload: Mapping[str, Any] = field(default_factory=dict, compare=False)


Downstream = Callable[[Control], Iterable[int] | None]
"""Which ids a downstream holds and may have to give up. One too many does no harm: each is read anew.

It gets users' own control pods too, and does itself what they ask for. It raises Refused where that can never be done:
then the pod is taken away, and noted in ``tube.fault``. After any other error the pod stays, and its turn comes again.
"""
