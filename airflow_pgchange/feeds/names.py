"""How people name consumers: as status shows them, by their kind and what that calls them by."""

from __future__ import annotations

import re
from dataclasses import dataclass

TEXT = ".+"
"""Any text, also with slashes: a name has one such part, or two where the other one has none."""
WORD = "[^/]+"
"""Any text, whose slashes and percent signs are written ``%2F`` and ``%25``: it ends where a slash is."""
NUMBER = "0|[1-9][0-9]{0,18}"
"""A number as SQL and Python write it, so that a consumer has one name."""
PREFIX = re.compile("[^:{}]+:")


@dataclass(frozen=True)
class Names:
    """The names of one kind of feed. ``form`` is a format. ``parts`` are patterns of the parts that it takes, each
    ``TEXT``, ``WORD`` or ``NUMBER``.

    ``form`` begins with a word and a colon, its prefix, which no other kind has. ``example`` is such a name. ``instead``:
    what to do where consumers of the kind cannot be moved.
    """

    form: str
    parts: tuple[str, ...]
    example: str
    instead: str = ""

    @property
    def prefix(self) -> str:
        """How all of them begin; no other kind's do."""
        return self.form.partition("{")[0]

    def of(self, *parts: object) -> str:
        """The name of a consumer."""
        shown = [
            _written(str(part)) if pattern == WORD else part
            for part, pattern in zip(parts, self.parts, strict=True)
        ]
        return self.form.format(*shown)

    def read(self, name: str) -> tuple[str, ...] | None:
        """What is filled in, as text; None where the name is none of these."""
        pattern = re.escape(self.form).replace(r"\{\}", "{}").format(*(f"({part})" for part in self.parts))
        match = re.fullmatch(pattern, name, re.DOTALL)
        if match is None:
            return None
        parts = tuple(
            _meant(part) if pattern == WORD else part
            for part, pattern in zip(match.groups(), self.parts, strict=True)
        )
        return parts if self.of(*parts) == name else None


def prefix_of(name: str) -> str:
    """The prefix of a consumer's name, by which its kind is found; empty where it has none."""
    found = PREFIX.match(name)
    return "" if found is None else found[0]


def _written(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def _meant(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")
