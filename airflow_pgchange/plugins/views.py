"""A view of one database on the page: a query, and the part of the answer that each user may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class View(Generic[M]):
    """A view of one database.

    ``question`` queries the database. It takes arguments, if any, and then the connections. ``nothing`` is shown until
    the database has answered. ``hidden`` removes the parts of an answer that need the right to read the connection. An
    answer has a field ``failure``.
    """

    question: Callable[..., M]
    nothing: M
    hidden: Callable[[M], M]
