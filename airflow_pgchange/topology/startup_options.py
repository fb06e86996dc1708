"""How a client says that it wants to hear of the topology: a word of its startup packet, raw or within ``options``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from airflow_pgchange.errors import ClientRefused

WORDS: dict[str, tuple[str, ...]] = {"smart_connector": ("0.1",), "picodata_catalog_cdc": ("1",)}
"""The words, and the versions of each that are spoken here."""
PART = re.compile(r"(?:\\.|[^\s\\]|\\$)+", re.DOTALL)
HINT = "add options='-c smart_connector=0.1' to the connection string; for SQL connect to an instance"


def check_word(parameters: Mapping[str, str]) -> None:
    """Raises ClientRefused for a client that says no word, or an unknown version of one."""
    said = {**dict(options_of(parameters.get("options", ""))), **parameters}
    found = [word for word in WORDS if word in said]
    if not found:
        raise ClientRefused(
            "0A000", "this server sends changes of a cluster's topology, and takes no SQL", HINT
        )
    # Two words mean the same, so that one known version is enough.
    if not any(said[word] in WORDS[word] for word in found):
        known = ", ".join(f"{word} = {version}" for word in WORDS for version in WORDS[word])
        raise ClientRefused("0A000", f"{found[0]} = {said[found[0]]} is not spoken here", f"what is: {known}")


def options_of(text: str) -> Iterator[tuple[str, str]]:
    """The settings in a startup packet's ``options``: ``-c name=value``, ``--name=value`` and ``name=value``, where a
    backslash takes the meaning from what follows it. What is none of these is passed over."""
    parts = [re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in PART.findall(text)]
    for part in parts:
        name, equals, value = part.removeprefix("--" if part.startswith("--") else "-c").partition("=")
        if equals:
            yield name.replace("-", "_"), value
