"""Edits of Python code: the operators of cosmic-ray that make faults which people make, and some edits that it
lacks."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.provider import OperatorProvider

from tests.suite.mutants.mutant import Edit
from tests.suite.parsing import syntax

_KINDS = {
    "AddNot": "negate",
    "ReplaceUnaryOperator_Delete_Not": "negate",
    "ReplaceTrueWithFalse": "true and false",
    "ReplaceFalseWithTrue": "true and false",
    "ReplaceAndWithOr": "and and or",
    "ReplaceOrWithAnd": "and and or",
    "ReplaceBreakWithContinue": "leave a loop",
    "ReplaceContinueWithBreak": "leave a loop",
    "NumberReplacer": "off by one",
    "ZeroIterationForLoop": "no iteration",
    "ReplaceComparisonOperator_Lt_LtE": "off by one",
    "ReplaceComparisonOperator_LtE_Lt": "off by one",
    "ReplaceComparisonOperator_Gt_GtE": "off by one",
    "ReplaceComparisonOperator_GtE_Gt": "off by one",
    "ReplaceComparisonOperator_Eq_NotEq": "comparison",
    "ReplaceComparisonOperator_NotEq_Eq": "comparison",
    "ReplaceComparisonOperator_Is_IsNot": "comparison",
    "ReplaceComparisonOperator_IsNot_Is": "comparison",
    "ReplaceBinaryOperator_Add_Sub": "arithmetic",
    "ReplaceBinaryOperator_Sub_Add": "arithmetic",
    "ReplaceBinaryOperator_Mul_Div": "arithmetic",
}


def edits(text: str) -> Iterator[Edit]:
    """Yield edits of a module. The module still parses after each edit."""
    at = _offsets(text)
    pieces = [_span(node, at) for node in syntax(text).body]
    for edit in (*_operator_edits(text), *_statement_edits(text)):
        # Parse only the statement that is edited, which is faster than parsing the module.
        start, end = next((p for p in pieces if p[0] <= edit.start and edit.end <= p[1]), (0, len(text)))
        if _parses(edit.moved(-start).apply(text[start:end])):
            yield edit


def places(text: str) -> Callable[[int], str]:
    """Return a function that returns the function or class at a position, as a dotted name."""
    at = _offsets(text)
    found: list[tuple[int, int, str]] = []

    def look(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}".lstrip(".")
                found.append((*_span(child, at), name))
            look(child, name)

    look(syntax(text), "")
    return lambda position: next((n for start, end, n in reversed(found) if start <= position < end), "")


def _parses(text: str) -> bool:
    try:
        syntax(text)
    except SyntaxError:
        return False
    return True


def _operator_edits(text: str) -> Iterator[Edit]:
    known = OperatorProvider()
    operators = [(known[name](), kind) for name, kind in _KINDS.items()]
    lines = _line_starts(text)
    for node in ast_nodes(get_ast(text)):
        for operator, kind in operators:
            positions = list(operator.mutation_positions(node))
            if not positions or _is_noise(node):
                continue
            # Try only the number above a number: if tests notice that, they notice the number below, too.
            for index in range(1 if node.type == "number" else len(positions)):
                yield _mutated(operator, node, index, lines, kind)


def _mutated(operator: Any, node: Any, index: int, lines: list[int], kind: str) -> Edit:
    """Return the edit that an operator makes, reduced to the characters that change."""
    start, end = (lines[line - 1] + column for line, column in (node.start_pos, node.end_pos))
    before = node.get_code(include_prefix=False)
    # An operator changes the node, so give it a copy. The copy keeps the parent, because operators examine the parent.
    mutated = operator.mutate(copy.deepcopy(node, {id(node.parent): node.parent}), index)
    after = mutated.get_code(include_prefix=False).lstrip()
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    return Edit(start + head, end - tail, after[head : len(after) - tail], kind)


def _common(one: str, other: str) -> int:
    """Return the number of characters at the start of two texts that are equal."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _is_noise(node: Any) -> bool:
    """Whether a node is not worth a mutant.

    These are annotations, decorators and conditions for them, marks between parameters, fractions, and conditions that
    are negated already.
    """
    if node.type == "number" and not node.value.isdigit():
        return True
    if node.parent is not None and node.parent.type == "parameters":
        return True
    if node.type in ("if_stmt", "while_stmt") and node.children[1].type == "not_test":
        return True
    # An import for annotations also works if it is always executed.
    if node.type == "if_stmt" and node.children[1].get_code().strip() == "TYPE_CHECKING":
        return True
    while node.parent is not None:
        outer = node.parent
        if outer.type == "annassign" and node in outer.children[:2]:
            return True
        if outer.type in ("tfpdef", "decorator"):
            return True
        if outer.type == "funcdef" and node is outer.annotation:
            return True
        node = outer
    return False


def _statement_edits(text: str) -> Iterator[Edit]:
    at = _offsets(text)
    tree = syntax(text)
    checks: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.If(body=[ast.Raise() as only], orelse=[]):
                checks.add(only)
                yield Edit(*_span(node, at), "pass", "skip check")
            case ast.Raise() if node not in checks:
                yield Edit(*_span(node, at), "pass", "swallow error")
            case ast.ExceptHandler(body=body):
                if not isinstance(body[0], ast.Raise | ast.Pass):
                    yield Edit(_span(body[0], at)[0], _span(body[-1], at)[1], "pass", "swallow error")
                if node.type is not None:
                    yield Edit(*_span(node.type, at), "()", "miss error")
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                yield Edit(*_span(node, at), "pass", "drop call")
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        start, end = _span(bound, at)
                        yield Edit(start, end, f"({text[start:end]}) + 1", "off by one")
            case ast.Call(func=ast.Name(id="range"), args=[*_, last]) if not isinstance(last, ast.Constant):
                start, end = _span(last, at)
                yield Edit(start, end, f"({text[start:end]}) + 1", "off by one")


def _span(node: Any, at: Callable[[int, int], int]) -> tuple[int, int]:
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


def _line_starts(text: str) -> list[int]:
    return [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]


def _offsets(text: str) -> Callable[[int, int], int]:
    """Return a function from line and column to the position in the text.

    The standard parser counts columns in bytes.
    """
    starts, lines = _line_starts(text), text.splitlines(keepends=True)
    return lambda line, column: starts[line - 1] + len(lines[line - 1].encode()[:column].decode())
