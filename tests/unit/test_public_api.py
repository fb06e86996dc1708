"""The public API: the exported names of each module, the cost of their import, and that examples use only them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.public_api import LISTING, NAME, Module, definition, described, listing, module, places
from tests.readme import ROOT, blocks
from tests.suite.parsing import syntax

PLACES = {place.name: place for place in places()}
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("dags", "demo") for path in (ROOT / folder).rglob("*.py")
)
DOTTED = re.compile(rf"{NAME}(?:\.\w+)+")
DAGS = f"{NAME}.example_dags"


def test_the_public_names_and_their_signatures_are_those_of_the_listing() -> None:
    assert listing() == LISTING.read_text(), (
        "the public API differs from tests/public_api.txt: say in CHANGELOG.md what changed for users, then write the "
        "listing anew with `python -m tests.public_api`"
    )


@pytest.mark.parametrize("place", PLACES.values(), ids=lambda place: place.name)
def test_every_name_that_a_place_exports_is_there(place: Module) -> None:
    """Takes a second if it is the first test that needs Airflow."""
    there = import_module(place.name)
    assert place.exported == tuple(sorted(place.exported, key=_by_kind))
    assert {name for name in place.exported if not hasattr(there, name)} == set()
    assert set(place.exported) <= set(dir(there))


@pytest.mark.parametrize("place", PLACES.values(), ids=lambda place: place.name)
def test_no_exported_name_is_that_of_a_module(place: Module) -> None:
    """If such a module were imported, it would replace the exported name."""
    assert [name for name in place.exported if module(f"{place.name}.{name}") is not None] == []


def _by_kind(name: str) -> tuple[bool, str]:
    return name[0].islower(), name


@pytest.mark.parametrize("place", PLACES.values(), ids=lambda place: place.name)
def test_a_name_that_is_imported_when_it_is_used_comes_from_the_module_that_type_checkers_see(
    place: Module,
) -> None:
    there = import_module(place.name)
    assert set(place.lazy) <= set(place.exported)
    for name in place.lazy:
        found = definition(place, name)
        assert found is not None
        assert getattr(there, name) is getattr(import_module(found[0].name), name)


def test_a_name_that_a_place_does_not_export_is_refused() -> None:
    there = import_module(f"{NAME}.operators")
    with pytest.raises(AttributeError, match=f"module '{NAME}.operators' has no attribute 'NoOperator'"):
        _ = there.NoOperator


LIGHT = """
import sys

def loaded():
    return {name.partition(".")[0] for name in sys.modules} & {"airflow", "psycopg", "pyspark", "cryptography"}

import airflow_pgchange, airflow_pgchange.errors
assert not loaded(), loaded()
import airflow_pgchange.admin, airflow_pgchange.assets, airflow_pgchange.decorators, airflow_pgchange.hooks
import airflow_pgchange.operators, airflow_pgchange.results, airflow_pgchange.sensors, airflow_pgchange.spark
import airflow_pgchange.triggers
assert not loaded(), loaded()
from airflow_pgchange import CommitFeed
assert loaded() == {"psycopg"}, loaded()
"""


def test_importing_a_place_loads_nothing_that_its_names_need() -> None:
    """The test needs a new process, because this process has already imported everything."""
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def imports(text: str, path: str) -> Iterator[tuple[str, str]]:
    """Return the imports from the package in a piece of Python code: the module and the name, or only the module."""
    for node in ast.walk(syntax(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None and _is_ours(node.module):
            yield from ((node.module, alias.name) for alias in node.names)


def _is_ours(name: str) -> bool:
    return name == NAME or (name.startswith(f"{NAME}.") and not name.startswith(DAGS))


def is_public(origin: str, name: str) -> bool:
    """Whether a place exports the name, or the name is a place."""
    place = PLACES.get(origin)
    return f"{origin}.{name}".rstrip(".") in PLACES or (place is not None and name in place.exported)


def not_public(text: str, path: str) -> list[str]:
    return [f"{path}: {origin} {name}" for origin, name in imports(text, path) if not is_public(origin, name)]


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_imports_public_names_alone(path: str) -> None:
    assert not_public((ROOT / path).read_text(), path) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_imports_and_names_public_names_alone(page: str) -> None:
    examples = [textwrap.dedent(example) for example in blocks("python", page)]
    assert [line for example in examples for line in not_public(example, page)] == []
    prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = {each for each in DOTTED.findall(prose) if _is_ours(each)}
    assert {each for each in named if not is_public(*each.rpartition(".")[::2])} == set()


def test_the_guide_names_every_place() -> None:
    section = (
        (ROOT / "docs" / "how-to" / "airflow.md")
        .read_text()
        .partition("## What is public\n")[2]
        .partition("\n## ")[0]
    )
    table = [row for row in section.splitlines() if row.startswith("|")]
    assert set(re.findall(rf"`({NAME}[\w.]*)`", "\n".join(table))) == set(PLACES)


def test_an_import_of_a_module_that_is_not_public_is_noticed() -> None:
    example = f"from {NAME}.feeds.batch import Batch\nfrom {NAME} import feeds, Change, nothing\n"
    assert not_public(example, "it") == [f"it: {NAME}.feeds.batch Batch", f"it: {NAME} nothing"]


def test_a_default_that_is_a_constant_is_listed_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    triggers = module(f"{NAME}.triggers.feed")
    assert triggers is not None
    for value in ("0.1", "0.2"):
        monkeypatch.setitem(triggers.defined, "POLL_INTERVAL", syntax(f"POLL_INTERVAL = {value}").body[0])
        lines = described(PLACES[f"{NAME}.triggers"], "FeedTrigger", {}, {})
        assert f"poll_interval: Seconds={value}," in "".join(lines)
