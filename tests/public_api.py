"""The public names of the package with their signatures, read from its files.

``python -m tests.public_api`` writes the listing anew.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.suite.parsing import syntax

ROOT = Path(__file__).parents[1]
NAME = "airflow_pgchange"
LISTING = ROOT / "tests" / "public_api.txt"
HEAD = f"""\
# The public names of {NAME} with their signatures, by the place to import each from. A change of this file is a
# change for users: say it in CHANGELOG.md. `python -m tests.public_api` writes this file anew.
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef
CALLED = ("__init__", "__call__")


@dataclass(frozen=True)
class Module:
    """A file of the package: the names that it defines, and the source of each name that it imports from the package."""

    name: str
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    exported: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()
    """The names that the module passes to ``lazily()``, which imports them when they are used."""
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []), compare=False)


@cache
def module(name: str) -> Module | None:
    """Read a module; None if the package has no such file."""
    path = ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    tree = syntax(file.read_text())
    found = Module(name)
    exported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME):
            found.imported.update(
                {each.asname or each.name: (str(node.module), each.name) for each in node.names}
            )
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            found.defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.defined[node.targets[0].id] = node
            if node.targets[0].id == "__all__":
                exported = ast.literal_eval(node.value)
    return Module(name, found.defined, found.imported, tuple(exported), tuple(_lazy(tree)), tree)


def _lazy(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazily":
            for names in ast.literal_eval(node.args[1]).values():
                yield from names


def places() -> list[Module]:
    """Return the package itself, and then each of its modules and subpackages that export names."""
    stems = sorted(path.stem for path in (ROOT / NAME).iterdir() if not path.stem.startswith("_"))
    found = [module(name) for name in (NAME, *(f"{NAME}.{stem}" for stem in stems))]
    return [each for each in found if each is not None and each.exported]


def definition(place: Module, name: str) -> tuple[Module, ast.stmt] | None:
    """Follow a name to the module that defines it."""
    if name in place.defined:
        return place, place.defined[name]
    origin, real = place.imported.get(name, ("", ""))
    found = module(origin)
    return None if found is None else definition(found, real)


def listing() -> str:
    """Return the expected content of ``tests/public_api.txt``."""
    whole, *others = places()
    home = {name: place.name for place in others for name in place.exported}
    lines = [HEAD, whole.name, *(f"    {name}: see {home[name]}" for name in whole.exported)]
    bases: dict[str, list[str]] = {}
    for place in others:
        lines += ["", place.name]
        for name in place.exported:
            lines += [f"    {line}" for line in described(place, name, home, bases)]
    lines += ["", "What these classes inherit, which is imported by nobody"]
    lines += [f"    {line}" for name in sorted(bases) for line in bases[name]]
    return "\n".join(lines) + "\n"


def described(place: Module, name: str, home: dict[str, str], bases: dict[str, list[str]]) -> Iterator[str]:
    """Return the lines about an exported name.

    If the name is a class, also record in ``bases`` the members that it inherits from classes that no module exports.
    """
    found = definition(place, name)
    assert found is not None, f"{place.name} exports {name}, and nothing defines it"
    where, node = found
    if isinstance(node, Function):
        yield _signature(where, node)
    elif isinstance(node, ast.ClassDef):
        inherited = dict(bases_of(where, node))
        bases_written = ", ".join(dict.fromkeys([*inherited, *map(ast.unparse, node.bases)]))
        yield f"class {name}" + (f"({bases_written})" if bases_written else "")
        known = {member for base in inherited.values() for member in _inherited(*base)}
        yield from (f"    {line}" for line in _members(where, node, known))
        for base, (origin, _) in inherited.items():
            if base not in home and base not in bases:
                bases[base] = []
                bases[base] = list(described(origin, base, home, bases))
    else:
        assert isinstance(node, ast.Assign)
        yield f"{name} = {ast.unparse(node.value)}"


def bases_of(where: Module, node: ast.ClassDef) -> Iterator[tuple[str, tuple[Module, ast.ClassDef]]]:
    """Return the classes of this package from which a class inherits, and the contract that a kind of feed implements."""
    names = [ast.unparse(base) for base in node.bases]
    for decorator in node.decorator_list:
        if ast.unparse(decorator) == "kind_of_feed":
            names.append("Feed" if names else "Watched")
            where = Module(where.name, where.defined, {**where.imported, **_contracts()})
    for name in names:
        found = definition(where, name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            yield name, (found[0], found[1])


def _contracts() -> dict[str, tuple[str, str]]:
    return {name: (f"{NAME}.feeds", name) for name in ("Feed", "Watched")}


def _inherited(where: Module, node: ast.ClassDef) -> Iterator[str]:
    yield from (each.name for each in node.body if isinstance(each, Function) and each.name not in CALLED)
    for _, base in bases_of(where, node):
        yield from _inherited(*base)


def _members(where: Module, node: ast.ClassDef, known: set[str]) -> Iterator[str]:
    """Return the fields of a dataclass, the attributes that a class sets, and the public methods that no base has."""
    is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    is_protocol = any(ast.unparse(base) == "Protocol" for base in node.bases)
    for each in node.body:
        if isinstance(each, ast.Assign) and any(ast.unparse(base).endswith("Enum") for base in node.bases):
            yield ast.unparse(each)
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            kind = ast.unparse(each.annotation)
            if is_protocol or (is_dataclass and not kind.startswith("ClassVar")):
                default = "" if each.value is None else f" = {ast.unparse(_value(where, each.value))}"
                yield f"{ast.unparse(each.target)}: {kind}{default}"
    yield from dict.fromkeys(_attributes(node))
    for each in node.body:
        if isinstance(each, Function) and (
            each.name in CALLED or not (each.name.startswith("_") or each.name in known)
        ):
            yield _signature(where, each)


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Return the attributes that a class sets in ``__init__`` or ``__enter__``, except its arguments."""
    for method in node.body:
        if isinstance(method, Function) and method.name in ("__init__", "__enter__"):
            taken = {arg.arg for arg in (*method.args.args, *method.args.kwonlyargs)}
            for each in ast.walk(method):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    is_own = ast.unparse(each.value) == "self"
                    if is_own and not each.attr.startswith("_") and each.attr not in taken:
                        yield each.attr


def _signature(where: Module, node: Function) -> str:
    args = copy.deepcopy(node.args)
    for defaults in (args.defaults, args.kw_defaults):
        defaults[:] = [each if each is None else _value(where, each) for each in defaults]
    kinds = [ast.unparse(each) for each in node.decorator_list]
    shown = "".join(f"@{kind} " for kind in kinds if kind in ("classmethod", "property", "staticmethod"))
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returned = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{shown}{word} {node.name}({ast.unparse(args)}){returned}"


def _value(where: Module, value: ast.expr) -> ast.expr:
    """Return a default value as it is written. If it is a constant of this package, return the value of the constant."""
    if isinstance(value, ast.Name):
        found = definition(where, value.id)
        if (
            found is not None
            and isinstance(found[1], ast.Assign)
            and isinstance(found[1].value, ast.Constant)
        ):
            return found[1].value
    return value


if __name__ == "__main__":
    LISTING.write_text(listing())
