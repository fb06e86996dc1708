"""The startup option with which a client requests the topology: a parameter of its startup packet, or in ``options``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from airflow_pgchange.errors import ClientRefused

WORDS: dict[str, tuple[str, ...]] = {"smart_connector": ("0.1",), "picodata_catalog_cdc": ("1",)}
"""The names of the option, each with the protocol versions that the relay supports."""
PART = re.compile(r"(?:\\.|[^\s\\]|\\$)+", re.DOTALL)
HINT = "add options='-c smart_connector=0.1' to the connection string; for SQL connect to an instance"


def check_word(parameters: Mapping[str, str]) -> None:
    """Raise ClientRefused if the client does not request the topology, or requests an unsupported version."""
    settings = {**dict(options_of(parameters.get("options", ""))), **parameters}
    words = [word for word in WORDS if word in settings]
    if not words:
        raise ClientRefused(
            "0A000", "this server sends changes of a cluster's topology, and takes no SQL", HINT
        )
    # Both names mean the same, so one supported version is enough.
    if not any(settings[word] in WORDS[word] for word in words):
        supported = ", ".join(f"{word} = {version}" for word in WORDS for version in WORDS[word])
        raise ClientRefused(
            "0A000", f"{words[0]} = {settings[words[0]]} is not supported", f"use one of: {supported}"
        )


def options_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the settings in a startup packet's ``options``: ``-c name=value``, ``--name=value`` and ``name=value``.

    A backslash escapes the next character. Other parts are ignored.
    """
    parts = [re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in PART.findall(text)]
    for part in parts:
        name, equals, value = part.removeprefix("--" if part.startswith("--") else "-c").partition("=")
        if equals:
            yield name.replace("-", "_"), value
