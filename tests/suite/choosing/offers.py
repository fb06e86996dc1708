"""The functions that ``pgchange.offer`` creates in schemas, and the feeds that call them. Their names are written
nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.suite.choosing.parts import Part, sql_named

TEMPLATE = re.compile(r"add_offer\(\s*'([\w ]+)', '(\w+)'.*?\$\$(.*?)\$\$", re.DOTALL)
CALLED = re.compile(r"%(?:1|10)\$I\.(\w+)")
OFFER = re.compile(r"pgchange\.offer\(\s*'\w+', '(\w+)',.*?\);", re.DOTALL)
LISTS = re.compile(r"'\{(.*?)\}'", re.DOTALL)
EVERY_KIND = "feed"
"""The trait that every schema has, without being named in a call."""
FEED = re.compile(
    r'^class (\w+)\((?:Offered|Schema)Feed\):.*?^    schema: ClassVar\[str\] = "(\w+)"',
    re.DOTALL | re.MULTILINE,
)
ASKED = re.compile(r'_select\("(\w+)"|schema\}\.(\w+)"')


def offered(texts: Mapping[str, str]) -> Iterator[Part]:
    """Yield a part for each function that a schema is given, and for each feed by its schema.

    ``texts`` has the content of the files by path.
    """
    made = {path: text for path, text in texts.items() if path.endswith(".sql")}
    templates = [template for text in made.values() for template in TEMPLATE.findall(text)]
    for path, text in made.items():
        for offer in OFFER.finditer(text):
            traits, own = [*(listed.split(",") for listed in LISTS.findall(offer[0])), []][:2]
            for trait, name, body in templates:
                if trait in [*traits, EVERY_KIND] and name not in own:
                    uses = {f"sql:{offer[1]}.{called}" for called in CALLED.findall(body)} | sql_named(body)
                    yield Part(
                        path, *_lines(text, offer), frozenset({f"sql:{offer[1]}.{name}"}), frozenset(uses)
                    )
    base = texts.get("airflow_pgchange/feeds/schema_feed.py", "")
    asked = {one or other for one, other in ASKED.findall(base)}
    for path, text in texts.items():
        if path.endswith(".py"):
            module = path.removesuffix(".py").replace("/", ".")
            for feed in FEED.finditer(text):
                uses = {f"sql:{feed[2]}.{name}" for name in asked}
                yield Part(path, *_lines(text, feed), frozenset({f"py:{module}.{feed[1]}"}), frozenset(uses))


def _lines(text: str, found: re.Match[str]) -> tuple[int, int]:
    return text.count("\n", 0, found.start()) + 1, text.count("\n", 0, found.end()) + 1
