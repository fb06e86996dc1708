"""How many requests may hold a thread of Airflow's API server at once: all of its routes share those threads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from anyio import Semaphore, fail_after
from fastapi import HTTPException, Request

from airflow_pgchange.utils.compat import left_before_the_answer

WAITING = 100
"""So many requests wait for their turn; one more is refused."""
PATIENCE = 5.0
"""Seconds that a request waits for its turn."""


@dataclass
class Room:
    """Lets so many requests in at once. The others wait without a thread, and not for long."""

    places: int
    _slots: Semaphore = field(init=False)
    _waiting: int = 0

    def __post_init__(self) -> None:
        self._slots = Semaphore(self.places)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Hold a place. Raises HTTPException 503 if none is free in time."""
        if self._waiting >= WAITING:
            raise _crowded()
        self._waiting += 1
        try:
            with fail_after(PATIENCE):
                await self._slots.acquire()
        except TimeoutError:
            raise _crowded() from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()


@dataclass
class Rooms:
    """A look takes about a second at most, an action up to a minute. Both together leave Airflow 20 of its 40 threads."""

    looks: Room = field(default_factory=lambda: Room(14))
    actions: Room = field(default_factory=lambda: Room(6))


def room(name: Literal["looks", "actions"]) -> Any:
    """A dependency of a route, to be asked after who may: the route goes on once there is room for it."""

    async def enter(request: Request) -> AsyncIterator[None]:
        rooms: Rooms = request.app.state.rooms
        async with getattr(rooms, name).entered():
            yield

    return left_before_the_answer(enter)


def _crowded() -> HTTPException:
    return HTTPException(
        503, "too many requests of this page are under way: try again in some seconds", {"Retry-After": "5"}
    )
