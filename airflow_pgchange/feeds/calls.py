"""Calls of our SQL functions, as complete statements without parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb


def call(function: str, *arguments: Any) -> sql.Composed:
    """``schema.function(...)``, as an expression; a mapping becomes jsonb."""
    return sql.SQL("{}({})").format(
        sql.Identifier(*function.split(".")), sql.SQL(", ").join(map(_literal, arguments))
    )


def select(function: str, *arguments: Any) -> sql.Composed:
    """``select schema.function(...)``: one row with one column."""
    return sql.SQL("select {}").format(call(function, *arguments))


def _literal(argument: Any) -> sql.Literal:
    return sql.Literal(Jsonb(dict(argument)) if isinstance(argument, Mapping) else argument)
