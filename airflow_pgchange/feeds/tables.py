"""Names of tables, and the tables that touch a tube."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from airflow_pgchange.feeds.errors import InvalidArgument

_PART = r'"(?:[^"]|"")+"|[^".][^.]*'
_NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")


def table_parts(table: str) -> tuple[str, ...]:
    """Schema and name, or only the name, that ``schema.table`` or ``table`` means.

    A part in double quotes may hold anything, as in SQL; one without is taken as it stands, whatever its letters. Raises
    InvalidArgument for anything else.
    """
    match = _NAME.fullmatch(table)
    if match is None:
        raise InvalidArgument(f"{table!r} is no name of a table: write it as schema.table")
    return tuple(_unquoted(part) for part in match.groups() if part)


def table_identifier(table: str) -> sql.Identifier:
    """The same as an identifier; raises InvalidArgument."""
    return sql.Identifier(*table_parts(table))


def quoted(name: str) -> str:
    """A name as a part that ``table_parts`` understands."""
    if "." not in name and not name.startswith('"'):
        return name
    return '"' + name.replace('"', '""') + '"'


def named(template: str, tube: str, table: str) -> str:
    """``template`` with ``{tube}`` and ``{table}`` filled in. Raises InvalidArgument where it holds other fields."""
    try:
        return template.format(tube=quoted(tube), table=quoted(table))
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidArgument(
            f"{template!r}: only {{tube}} and {{table}} can be filled in, and {error} is neither"
        ) from error


@dataclass(frozen=True)
class Attached:
    """A table that touches a tube.

    ``shared``: a copy that is called like the table is one of several tables' rows, for another of this name touches the
    tube too, or did under another shard: such a copy has a column ``shard``, and its key is (shard, id). ``twin`` is the
    other table with this name and this shard, whose rows no copy could tell apart.
    """

    tube: str
    shard: int
    schema: str
    name: str
    id_column: str
    predicate: str | None = None
    shared: bool = False
    twin: str | None = None

    @classmethod
    def all(cls, tube: str, rows: Iterable[Mapping[str, Any]]) -> list[Attached]:
        """What ``TubeFeed.attached`` tells."""
        return [cls(tube, **row) for row in rows]

    @property
    def parts(self) -> tuple[str, str]:
        return self.schema, self.name

    @property
    def table(self) -> str:
        """As ``schema.table``, in quotes where that is needed."""
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def copy(self, template: str) -> str:
        """The name of its copy; raises InvalidArgument where its twin's rows would be in it."""
        if self.twin is not None and "{table}" in template:
            raise InvalidArgument(
                f"{self.table} and {self.twin} both touch tube {self.tube} under shard {self.shard}, so a copy could not "
                "tell their rows apart: attach one of them under another shard, or to another tube"
            )
        return named(template, self.tube, self.name)


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part
