"""The progress of an application, as notes ("step: how far") in a file beside its manifest. The operator logs them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path


class Notes:
    """The notes of one application. A note that cannot be written is dropped, because then the operator has ended."""

    def __init__(self, manifest: Path) -> None:
        self._path = manifest.with_name(manifest.name + ".notes")
        self._last: tuple[str, str] | None = None
        self._reported = 0

    def add(self, step: str, how_far: str) -> None:
        """Write how far a step is, unless the last note says the same."""
        if (step, how_far) == self._last:
            return
        self._last = step, how_far
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps([time.monotonic(), step, how_far]) + "\n")

    @property
    def began(self) -> float | None:
        """The time at which the application wrote its first note, by this machine's monotonic clock; None if it has not
        yet."""
        return next((float(when) for when, _, _ in self._read()), None)

    def __str__(self) -> str:
        """The notes since the last call: a line for each step, with its latest note. If there are none, the last note
        again."""
        notes = self._read()
        new = notes[self._reported :] or notes[-1:]
        self._reported = len(notes)
        latest = {step: f"{step}: {how_far}" for _, step, how_far in new}
        return "\n".join(latest.values()) or "starting"

    def _read(self) -> list[tuple[float, str, str]]:
        try:
            *whole, _ = self._path.read_text().split("\n")
        except FileNotFoundError:
            return []
        return [tuple(json.loads(line)) for line in whole]
