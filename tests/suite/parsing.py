"""Python as a tree of its syntax, and work that the garbage collector must not interrupt."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector from running inside the block, also if it was turned off before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def syntax(text: str) -> ast.Module:
    """Return the syntax tree of a module. Raises SyntaxError if the text is not Python.

    CPython before 3.11.8 keeps one count of how deep it is in a tree, for all trees (python/cpython#106905). The garbage
    collector may run while a tree is built. If a finalizer that it calls parses something itself, as the report of
    a traceback does, the count is wrong afterwards, and ``ast.parse`` raises SystemError. So the collector is off.
    """
    with collector_off():
        return ast.parse(text)
