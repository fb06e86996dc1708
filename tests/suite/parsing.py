"""Python as a tree of its syntax, whatever else this process has to clean up."""

from __future__ import annotations

import ast
import gc


def syntax(text: str) -> ast.Module:
    """Return the syntax tree of a module. Raises SyntaxError if the text is not Python.

    CPython before 3.11.8 keeps one count of how deep it is in a tree, for all trees (python/cpython#106905). The garbage
    collector may run while a tree is built. If a finalizer that it calls parses something itself, as the report of
    a traceback does, the count is wrong afterwards, and ``ast.parse`` raises SystemError. So the collector waits.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()
