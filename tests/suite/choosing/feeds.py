"""Which test files belong to a feed."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import PurePosixPath

from tests.suite.choosing.graph import Graph, is_test
from tests.suite.choosing.parts import Part
from tests.suite.choosing.ranking import Choice

FEEDS = ("tube", "event", "queue", "saga", "commit", "topology")
FOLDERS = ("tests/unit/", "tests/integration/")


def of_feed(graph: Graph, feed: str) -> list[Choice]:
    """The test files whose name has the feed's, and those that mostly call its schemas, the most faithful first."""
    schemas = _schemas(graph, feed)
    called: dict[str, Counter[str]] = defaultdict(Counter)
    for part, used in zip(graph.parts, graph.used, strict=True):
        if is_test(part.path) and part.path.startswith(FOLDERS):
            called[part.path].update(s for i in used if (s := _schema(graph.parts[i])))
    found = []
    for path, calls in called.items():
        share = sum(calls[schema] for schema in schemas) / max(1, calls.total())
        feeds = [one for one in FEEDS if one in _words(path)]
        if feed in feeds:
            found.append(Choice(path, 1 + share, "by its name"))
        elif share > 0.5 and not feeds:
            found.append(Choice(path, share, f"calls {', '.join(sorted(schemas))}"))
    return sorted(found, key=lambda choice: (-choice.score, choice.path))


def _schemas(graph: Graph, feed: str) -> set[str]:
    """Those that modules and tests of the feed's name call, but for what they rarely do."""
    pairs = zip(graph.parts, graph.used, strict=True)
    ours = (used for part, used in pairs if part.path.endswith(".py") and feed in _words(part.path))
    calls = Counter(schema for used in ours for index in used if (schema := _schema(graph.parts[index])))
    return {schema for schema, n in calls.items() if n > calls.total() / 4}


def _schema(part: Part) -> str:
    keys = sorted(key for key in part.keys if key.startswith("sql:"))
    return keys[0].removeprefix("sql:").partition(".")[0] if keys and part.path.startswith("sql/") else ""


def _words(path: str) -> set[str]:
    pure = PurePosixPath(path)
    return {word.rstrip("s") for piece in (*pure.parts[1:-1], pure.stem) for word in piece.split("_")}
