"""Python files as parts: the functions, classes and methods of a module, and what each names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.suite.choosing.parts import Part, named
from tests.suite.parsing import syntax

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Use a regular expression for names, because it is several times faster than walking the tree. The tree gives only the
# statements.
TOKEN = re.compile(
    r'("""(?:.*?)"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\')'
    r"|#[^\n]*|((?:\.|\b[A-Za-z_])\w*(?:\.[A-Za-z_]\w*)*)",
    re.DOTALL,
)
HOLE = re.compile(r"\{([A-Za-z_][\w.]*)")
MAKES_CODE_UP = re.compile(r"^from tests\.suite\.(?:choosing|mutants)\b", re.MULTILINE)
"""The strings in the tests of these folders contain made-up code, whose names mean nothing here."""
IDENTIFIER = re.compile(r'\bIdentifier\(\s*"(\w+)",\s*"(\w+)"')


@dataclass(frozen=True)
class Module:
    """A file's parts, which use names as the file writes them. ``imported`` has the full names of some of these."""

    path: str
    name: str
    parts: tuple[Part, ...]
    imported: dict[str, str]


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_python(path: str, text: str) -> Module:
    """Top-level code that defines nothing belongs to the module, because an import runs it."""
    name = module_name(path)
    tree = syntax(text)
    strings = not MAKES_CODE_UP.search(text)
    lines = text.splitlines(keepends=True)
    imported: dict[str, str] = {}
    parts = [Part(path, 0, 0, frozenset({f"py:{name}"}))]
    for node in _run(tree.body, imported):
        modules = _imports(node, imported)
        for piece in _pieces(path, name, node):
            uses = piece.uses | modules | _uses("".join(lines[piece.first - 1 : piece.last]), strings)
            if piece.keys == parts[-1].keys:
                before = parts.pop()
                first, uses = before.first or piece.first, uses | before.uses
            else:
                first = piece.first
            parts.append(replace(piece, first=first, uses=uses))
    return Module(path, name, tuple(parts), imported)


def _run(body: Sequence[ast.stmt], imported: dict[str, str]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported. Record imports for type checkers, which do not run."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                _imports(each, imported)
            yield from node.orelse
        else:
            yield node


def _pieces(path: str, module: str, node: ast.stmt) -> Iterator[Part]:
    """Yield the parts of a statement. A class is a part without its methods, and it uses its methods."""
    first, last = _lines(node)
    if isinstance(node, ast.ClassDef):
        key = f"py:{module}.{node.name}"
        methods = [inner for inner in node.body if isinstance(inner, FUNCTION)]
        head = _lines(methods[0])[0] - 1 if methods else last
        inside = frozenset(f"{key}.{method.name}" for method in methods)
        yield Part(path, first, max(first, head), frozenset({key}), inside)
        for method in methods:
            keys = frozenset({f"{key}.{method.name}", f"method:{method.name}"})
            yield Part(path, *_lines(method), keys, test=method.name.startswith("test_"))
    elif isinstance(node, FUNCTION):
        key = f"py:{module}.{node.name}"
        yield Part(path, first, last, frozenset({key}), test=node.name.startswith("test_"))
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        yield Part(path, first, last, frozenset(f"py:{module}.{name}" for name in names))
    else:
        yield Part(path, first, last, frozenset({f"py:{module}"}))


def _lines(node: ast.stmt) -> tuple[int, int]:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or node.lineno


def _imports(node: ast.stmt, imported: dict[str, str]) -> frozenset[str]:
    """Record the imports of a statement, at any depth, and return the modules that it runs."""
    found = set()
    waiting: list[ast.AST] = [node]
    while waiting:
        match waiting.pop():
            case ast.Import(names=names):
                for alias in names:
                    head = alias.name.partition(".")[0]
                    imported[alias.asname or head] = alias.name if alias.asname else head
                    found.add(f"py:{alias.name}")
            case ast.ImportFrom(module=str(origin), names=names):
                for alias in names:
                    imported[alias.asname or alias.name] = f"{origin}.{alias.name}"
                    found.add(f"py:{origin}")
            case inner:
                for block in ("body", "orelse", "finalbody", "handlers"):
                    nested = getattr(inner, block, [])
                    waiting += nested if isinstance(nested, list) else []
    return frozenset(found)


def _uses(text: str, strings: bool) -> frozenset[str]:
    found = {f"sql:{schema}.{name}" for schema, name in IDENTIFIER.findall(text)}
    for string, name in set(TOKEN.findall(text)):
        if name:
            found.add(f"name:{name}")
        elif string and strings:
            found |= named(string)
            found |= {f"name:{hole}" for hole in HOLE.findall(string)}
    return frozenset(found)
