"""What a view of one database is: a question to it, and what of the answer is for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class View(Generic[M]):
    """``question`` is asked of the database, with arguments before its connections if need be; ``nothing`` is shown
    before it has answered; ``hidden`` makes of an answer what is for everybody who may see lag and state. An answer has a
    field ``trouble``."""

    question: Callable[..., M]
    nothing: M
    hidden: Callable[[M], M]
