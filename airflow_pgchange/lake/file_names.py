"""Names of the files that an attempt on a batch writes. The name distinguishes them from the files of other writers."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"pgchange_([0-9A-Za-z-]+)_([0-9]+)_")


@dataclass(frozen=True)
class Attempt:
    """An attempt on a batch, as it is written in the names of data files."""

    batch: str
    number: int

    @classmethod
    def of(cls, batch_id: str, number: int) -> Attempt:
        return cls(re.sub(r"[^0-9A-Za-z-]", "-", batch_id), number)

    @classmethod
    def in_name(cls, name: str) -> Attempt | None:
        """Return the attempt that has written a file of this name; None if it is a file of another writer."""
        match = _NAME.search(name)
        return None if match is None else cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"pgchange_{self.batch}_{self.number}"
