"""Packages that import the names that they export when these are first used.

Airflow parses each DAG file in a new process, again and again. If a package imported all its modules, every DAG would pay
for modules that it does not use, such as those of Spark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package; ``names`` are what it exports, by the module of
    the package that defines them."""
    modules = {name: f"{package}.{module}" for module, defined in names.items() for name in defined}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names_of_package
