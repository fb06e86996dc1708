"""How people name consumers: as status shows them, by their kind and what that calls them by."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """The names of one kind of feed: ``form`` is a format, ``parts`` are patterns of what is filled in.

    ``example`` is such a name. ``instead``: what to do where consumers of the kind cannot be moved.
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
        return self.form.format(*parts)

    def read(self, name: str) -> tuple[str, ...] | None:
        """What is filled in, as text; None where the name is none of these."""
        pattern = re.escape(self.form).replace(r"\{\}", "{}").format(*(f"({part})" for part in self.parts))
        match = re.fullmatch(pattern, name, re.DOTALL)
        return None if match is None else match.groups()
