"""The names of consumers as status shows them, such as ``commits:delays/0``."""

from __future__ import annotations

import re
from dataclasses import dataclass

TEXT = ".+"
"""The pattern of any text, also with slashes. A name may have only one such part."""
WORD = "[^/]+"
"""The pattern of a text without a slash. Slashes and percent signs in it are written ``%2F`` and ``%25``."""
NUMBER = "0|[1-9][0-9]{0,18}"
"""The pattern of a number without leading zeros, so that a consumer has only one name."""
PREFIX = re.compile("[^:{}]+:")


@dataclass(frozen=True)
class Names:
    """The form of the names of one kind of feed.

    ``form`` is a format, which begins with the prefix of the kind: a word and a colon. ``parts`` are the patterns of the
    values in it, each ``TEXT``, ``WORD`` or ``NUMBER``. ``example`` is such a name. ``instead`` is the advice if
    consumers of the kind cannot be moved.
    """

    form: str
    parts: tuple[str, ...]
    example: str
    instead: str = ""

    @property
    def prefix(self) -> str:
        """The prefix of these names, which no other kind has."""
        return self.form.partition("{")[0]

    def of(self, *parts: object) -> str:
        """Return the name of a consumer."""
        shown = [
            _written(str(part)) if pattern == WORD else part
            for part, pattern in zip(parts, self.parts, strict=True)
        ]
        return self.form.format(*shown)

    def read(self, name: str) -> tuple[str, ...] | None:
        """Return the parts of a name as text; None if the name has another form."""
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
    """Return the prefix of a consumer's name, which identifies its kind. Empty if there is none."""
    match = PREFIX.match(name)
    return "" if match is None else match[0]


def _written(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def _meant(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")
