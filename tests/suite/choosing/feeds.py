"""Which tests belong to a feed."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import PurePosixPath

from tests.suite.choosing.graph import Graph, is_test
from tests.suite.choosing.parts import Part
from tests.suite.choosing.ranking import Choice, name_of

FEEDS = ("tube", "event", "queue", "saga", "commit", "topology")
FOLDERS = ("tests/unit/", "tests/integration/")


def of_feed(graph: Graph, feed: str) -> list[Choice]:
    """Return the tests in files that have the feed in their names, then those of files that mostly call its schemas."""
    why = _files(graph, feed)
    tests = [(index, part.path) for index, part in enumerate(graph.parts) if part.test and part.path in why]
    order = list(why)
    tests.sort(key=lambda test: (order.index(test[1]), test[0]))
    return [Choice(name_of(graph, index), why[path]) for index, path in tests]


def _files(graph: Graph, feed: str) -> dict[str, str]:
    """The test files of a feed, the most faithful first, each with the reason."""
    schemas = schemas_of(graph, feed)
    called: dict[str, Counter[str]] = defaultdict(Counter)
    for part, used in zip(graph.parts, graph.used, strict=True):
        if is_test(part.path) and part.path.startswith(FOLDERS):
            called[part.path].update(s for i in used if (s := _schema(graph.parts[i])))
    found = []
    for path, calls in called.items():
        share = sum(calls[schema] for schema in schemas) / max(1, calls.total())
        feeds = [one for one in FEEDS if one in _words(path)]
        if feed in feeds:
            found.append((-1 - share, path, "by the name of its file"))
        elif share > 0.5 and not feeds:
            found.append((-share, path, f"its file calls {', '.join(sorted(schemas))}"))
    return {path: why for _, path, why in sorted(found)}


def schemas_of(graph: Graph, feed: str) -> set[str]:
    """Return the schemas that the modules and tests of a feed's name call, except for those that they call rarely."""
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
