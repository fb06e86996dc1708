"""The graph of uses among the parts of a repository's files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from tests.suite.choosing.offers import offered
from tests.suite.choosing.parts import Part
from tests.suite.choosing.python_parts import Module, read_python
from tests.suite.choosing.sql_parts import sql_parts
from tests.suite.parsing import collector_off

KINDS = (".py", ".sql", ".md")
# If many classes have a method of the same name, the name does not tell which class is meant.
NAMESAKES = 3
NUMBERED = re.compile(r"\d\d_")
COMPOSED = re.compile(r"(?<=[a-z])[_$]")


@dataclass(frozen=True)
class Graph:
    """``used`` has, by the index of each part, the parts that it uses. ``texts`` has the files by their paths."""

    parts: Sequence[Part]
    used: Sequence[frozenset[int]]
    texts: Mapping[str, str]

    @cached_property
    def users(self) -> Mapping[int, Sequence[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for user, used in enumerate(self.used):
            for part in used:
                found[part].append(user)
        return found


def is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")


def read_graph(repo: Path) -> Graph:
    """Read every file of a known kind in a checkout, in its present state, committed or not."""
    # Reading creates no garbage, and is a seventh faster without the collector.
    with collector_off():
        return _read(repo)


def _read(repo: Path) -> Graph:
    paths = list(_paths(repo))
    modules: dict[str, Module] = {}
    parts: list[Part] = []
    texts = {path: (repo / path).read_text() for path in paths}
    for path, text in texts.items():
        if path.endswith(".py"):
            modules[path] = read_python(path, text)
            parts += modules[path].parts
        elif path.endswith(".sql"):
            parts += sql_parts(path, text)
        else:
            parts.append(Part(path, 1, text.count("\n") + 1, frozenset()))
    parts += offered(texts)
    named = frozenset(use for part in parts for use in part.uses if use.startswith("file:"))
    files = {path: _file_keys(path, modules, named) for path in paths}
    by_key: dict[str, set[int]] = defaultdict(set)
    for index, part in enumerate(parts):
        for key in part.keys | files[part.path]:
            by_key[key].add(index)
    return Graph(parts, list(_used(parts, _Names(modules, by_key))), texts)


def _paths(repo: Path) -> Iterator[str]:
    for top in sorted(repo.iterdir()):
        if not top.name.startswith("."):
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.suffix in KINDS:
                    yield path.relative_to(repo).as_posix()


def _file_keys(path: str, modules: Mapping[str, Module], named: Set[str]) -> set[str]:
    """Return the keys by which a text can name a file.

    If no text names it and nothing imports it, its folder is a key, too.
    """
    pure = PurePosixPath(path)
    if NUMBERED.match(pure.name) or pure.name == "__init__.py":
        return set()
    keys = {f"file:{pure.name}"}
    if pure.name == "__main__.py":
        keys.add(f"file:{pure.parent.name}")
    if pure.parts[0] == "tests" or f"{pure.parent}/__init__.py" in modules:
        return keys
    if pure.suffix == ".py":
        keys.add(f"file:{pure.stem}")
    return keys if keys & named else {f"file:{pure.parent.name}"}


def _used(parts: Sequence[Part], names: _Names) -> Iterator[frozenset[int]]:
    here, known = "", dict[str, frozenset[int]]()
    for index, part in enumerate(parts):
        if part.path != here:
            here, known = part.path, {}
        for use in part.uses - known.keys():
            known[use] = names.parts(here, use)
        yield frozenset[int]().union(*(known[use] for use in part.uses)) - {index}


@dataclass(frozen=True)
class _Names:
    """Resolve a name to the object that it means in the file that contains it."""

    modules: Mapping[str, Module]
    by_key: Mapping[str, set[int]]

    def parts(self, path: str, use: str) -> frozenset[int]:
        return frozenset(index for key in self._keys(path, use) for index in self.by_key.get(key, ()))

    def _keys(self, path: str, use: str) -> Iterator[str]:
        kind, _, name = use.partition(":")
        if kind == "name":
            yield from self._name(path, name)
        elif kind == "py":
            yield from self._dotted(name)
        elif use in self.by_key:
            yield use
        elif kind == "sql":
            yield from self._composed(name)

    def _name(self, path: str, name: str) -> Iterator[str]:
        head, *attributes = name.split(".")
        for attribute in attributes:
            if len(self.by_key.get(f"method:{attribute}", ())) <= NAMESAKES:
                yield f"method:{attribute}"
        module = self.modules[path]
        if head in module.imported:
            yield from self._dotted(".".join([module.imported[head], *attributes]))
        elif f"py:{module.name}.{head}" in self.by_key:
            yield from self._dotted(".".join([module.name, head, *attributes]))
        elif path.startswith("tests/"):
            yield from self._fixture(path, head)

    def _fixture(self, path: str, name: str) -> Iterator[str]:
        for folder in {"tests", path.rpartition("/")[0].replace("/", ".")}:
            yield f"py:{folder}.conftest.{name}"

    def _dotted(self, dotted: str) -> Iterator[str]:
        """Return the longest known beginning of a dotted name, through the names that packages export from their
        modules."""
        pieces = dotted.split(".")
        for n in range(len(pieces), 0, -1):
            head = ".".join(pieces[:n])
            if f"py:{head}" not in self.by_key:
                continue
            yield f"py:{head}"
            file = head.replace(".", "/")
            module = self.modules.get(f"{file}/__init__.py") or self.modules.get(f"{file}.py")
            onward = module.imported.get(pieces[n]) if module and n < len(pieces) else None
            if onward and onward != head:
                yield from self._dotted(".".join([onward, *pieces[n + 1 :]]))
            return

    def _composed(self, name: str) -> Iterator[str]:
        """The parts that create an object with a composed name, such as mbus.consume_q_by_reader."""
        schema, _, rest = name.partition(".")
        words = COMPOSED.split(rest)
        for n in range(len(words), 0, -1):
            key = f"made:{schema}.{'_'.join(words[:n])}"
            if key in self.by_key:
                yield key
                return
