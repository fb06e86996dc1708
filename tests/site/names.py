"""Pages of the public Python names, which mkdocstrings fills from their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from tests.public_api import Function, Module, bases_of, definition, places

FOLDER = "reference/python"


class Undocumented(Exception):
    """Raised if public names have no docstring."""


def pages() -> dict[str, str]:
    """Return the content of the page of each module that exports names, by the page's path. Raises Undocumented."""
    _, *found = places()
    exported = {name for place in found for name in place.exported}
    missing = [
        f"{place.name}.{name}" for place in found for name in place.exported if not _docstring(place, name)
    ]
    if missing:
        raise Undocumented(f"write a docstring for {', '.join(missing)}")
    return {f"{FOLDER}/{place.name.rpartition('.')[2]}.md": _page(place, exported) for place in found}


def _page(place: Module, exported: Set[str]) -> str:
    lines = [f"# {place.name.rpartition('.')[2].capitalize()}", "", _docstring(place, ""), ""]
    lines += [f"Import these names from `{place.name}`.", ""]
    found = {name: found for name in place.exported if (found := definition(place, name)) is not None}
    # The exporting module imports the name only when it is used, so refer to the module that defines the name.
    lines += [f"::: {where.name}.{name}\n" for name, (where, _) in found.items()]
    bases = {
        path: None
        for where, node in found.values()
        if isinstance(node, ast.ClassDef)
        for path in _bases(where, node, exported)
    }
    if bases:
        lines += [
            "## Bases of these classes",
            "",
            "Nobody imports these. The classes above take their arguments, too.",
            "",
        ]
        lines += [f"::: {path}\n    options:\n      heading_level: 3\n" for path in bases]
    return "\n".join(lines)


def _bases(where: Module, node: ast.ClassDef, exported: Set[str]) -> Iterator[str]:
    """Yield the base classes with arguments that the class takes, too, if no module exports the base class."""
    for name, (origin, base) in bases_of(where, node):
        if name not in exported and ":param" in (ast.get_docstring(base) or ""):
            yield f"{origin.name}.{name}"
        yield from _bases(origin, base, exported)


def _docstring(place: Module, name: str) -> str:
    """Return the docstring of a public name, or of the exporting module itself. Return an empty text if it has none."""
    if not name:
        return ast.get_docstring(place.tree) or ""
    found = definition(place, name)
    if found is None:
        return ""
    where, node = found
    if isinstance(node, ast.ClassDef | Function):
        return ast.get_docstring(node) or ""
    following = where.tree.body[where.tree.body.index(node) + 1 :]
    match following:
        case [ast.Expr(ast.Constant(str(text))), *_]:
            return text
    return ""
