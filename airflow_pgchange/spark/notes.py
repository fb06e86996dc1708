"""What an application is at, written down beside its manifest, for the operator to say."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path


class Notes:
    """Notes of one application, for which there is no batch any more where they cannot be written."""

    def __init__(self, manifest: Path) -> None:
        self._path = manifest.with_name(manifest.name + ".notes")
        self._last: tuple[str, str] | None = None
        self._said = 0

    def add(self, step: str, how_far: str) -> None:
        """Write down how far a step is, unless that is what the last note says."""
        if (step, how_far) == self._last:
            return
        self._last = step, how_far
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps([time.monotonic(), step, how_far]) + "\n")

    @property
    def began(self) -> float | None:
        """When the first was written, by the clock of this machine; None while there is none."""
        return next((float(when) for when, _, _ in self._read()), None)

    def __str__(self) -> str:
        """What is new since this was asked last, of each step the latest, a line each; or the last of all again."""
        notes = self._read()
        new = notes[self._said :] or notes[-1:]
        self._said = len(notes)
        latest = {step: f"{step}: {how_far}" for _, step, how_far in new}
        return "\n".join(latest.values()) or "starting"

    def _read(self) -> list[tuple[float, str, str]]:
        try:
            *whole, _ = self._path.read_text().split("\n")
        except FileNotFoundError:
            return []
        return [tuple(json.loads(line)) for line in whole]
