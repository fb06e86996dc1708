"""What is started, runs inside a ``with``, and is stopped at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Started(ABC):
    """Started at the beginning of a ``with`` and stopped at its end, and where it could not be started."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and return when it serves."""

    @abstractmethod
    def stop(self) -> None:
        """End all that was started; nothing of it is left."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
