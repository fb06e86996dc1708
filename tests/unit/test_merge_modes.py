"""The modes of a merge: a table states the behaviour of each, and no other code compares modes."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest

import airflow_pgchange
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.results.merge import Staged
from airflow_pgchange.results.merge_modes import BEHAVIOURS, Behaviour, Conflict, Mode, complete
from tests.suite.parsing import syntax

PACKAGE = Path(airflow_pgchange.__file__).parent
TABLE = PACKAGE / "results" / "merge_modes.py"


def is_mode(node):
    """Whether an expression is a mode: a member of ``Mode``, the name of a mode, or a variable or attribute
    ``mode``."""
    match node:
        case ast.Constant(value=str(name)):
            return name in list(Mode)
        case ast.Attribute(value=ast.Name(id="Mode")) | ast.Attribute(attr="mode") | ast.Name(id="mode"):
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(map(is_mode, parts))
    return False


def distinctions(source):
    """Return the lines of Python code that depend on the mode: comparisons, patterns and tables of modes."""
    for node in ast.walk(syntax(source)):
        match node:
            case ast.Compare(left=left, comparators=others):
                found = any(map(is_mode, [left, *others]))
            case ast.Match(subject=subject):
                found = is_mode(subject)
            case ast.MatchValue(value=value):
                found = is_mode(value)
            case ast.Dict(keys=keys):
                found = any(map(is_mode, keys))
            case _:
                continue
        if found:
            yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        'if mode == "upsert": pass',
        'if "mirror" == chosen: pass',
        "if staged.mode is not Mode.ADD: pass",
        'if staged.mode in ("append", "add"): pass',
        "if chosen in {Mode.ADD, Mode.APPEND}: pass",
        'match chosen:\n    case "add": pass',
        "match chosen:\n    case Mode.ADD: pass",
        "match staged.mode:\n    case _: pass",
        'PRIVILEGES = {"append": ()}',
    ],
)
def test_a_place_that_tells_modes_apart_is_found(code):
    assert list(distinctions(code))


def test_no_code_but_the_table_tells_modes_apart():
    rooms = [path for room in ("results", "spark") for path in sorted((PACKAGE / room).glob("*.py"))]
    assert TABLE in rooms
    found = [
        f"{path.name}:{line}" for path in rooms if path != TABLE for line in distinctions(path.read_text())
    ]
    assert found == []


def test_a_mode_without_behaviour_is_refused_when_the_table_is_made():
    lacking = {mode: behaviour for mode, behaviour in BEHAVIOURS.items() if mode != Mode.MIRROR}
    with pytest.raises(TypeError, match="no behaviour is stated for the modes mirror"):
        complete(lacking)


def test_no_field_of_a_behaviour_has_a_default():
    for kind in (Behaviour, Conflict):
        assert kind.__init__.__defaults__ is None
        assert len(fields(kind)) == kind.__init__.__code__.co_argcount - 1


def test_a_mode_that_resolves_conflicts_needs_a_key():
    with pytest.raises(TypeError, match="needs a key"):
        replace(Mode.REPLACE.behaviour, needs_key=False)


def test_a_name_becomes_a_mode():
    assert [Mode.of(name) for name in ("add", "replace", "mirror", "append")] == list(Mode)


def test_a_name_of_no_mode_is_refused_with_the_modes():
    with pytest.raises(
        InvalidArgument, match="mode must be one of add, replace, mirror, append, not 'upsert'"
    ):
        Mode.of("upsert")


def test_staged_rows_of_no_mode_have_no_behaviour():
    """A name that was not converted into a mode is an error. It never counts as another mode."""
    staged = Staged("public.t", ("id",), "upsert", "b00_1_00", (("id", "bigint"),), (), "batch", 1)
    with pytest.raises(AttributeError):
        _ = staged.behaviour
