"""The modes of a merge, and everything in which they differ, in one table.

Code that depends on the mode asks its ``Behaviour`` and never compares the mode itself. A new mode then has to state
every field, and cannot be taken for another mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, LiteralString

from airflow_pgchange.errors import InvalidArgument

Privilege = Literal["select", "insert", "update", "delete"]


class Mode(StrEnum):
    """How staged rows become rows of their target; ``Job.merge`` describes each mode."""

    ADD = "add"
    REPLACE = "replace"
    MIRROR = "mirror"
    APPEND = "append"

    @classmethod
    def of(cls, name: str) -> Mode:
        """Return the mode with this name, such as ``"add"``. Raises InvalidArgument for an unknown name."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidArgument(f"mode must be one of {', '.join(cls)}, not {name!r}") from None

    @property
    def behaviour(self) -> Behaviour:
        """The entry of this mode in ``BEHAVIOURS``."""
        return BEHAVIOURS[self]


@dataclass(frozen=True)
class Conflict:
    """How a merge changes a row of the target that has the same key as a staged row.

    The first two fields are SQL templates for one column outside the key. In them ``t`` is the row of the target.
    """

    assigned: LiteralString
    """The assignment to the column, whose name replaces {0}. The staged row is ``excluded``."""
    unchanged: LiteralString
    """The condition under which the assignment changes nothing. The staged row is ``s``. The column's name replaces {0},
    and its type {1}. {2} is replaced by a cast to text, except for numbers: not every type has an operator for
    equality."""
    idempotent: bool
    """Writing a row twice has the same effect as writing it once. A staged row that the target already holds therefore
    counts as written."""


@dataclass(frozen=True)
class Behaviour:
    """Everything in which the modes of a merge differ. No field has a default, so each mode states all of them."""

    privileges: tuple[Privilege, ...]
    """The privileges on the target that the role of the results connection needs."""
    selected: LiteralString
    """The template of the query that returns the rows to insert. {rows} is the query of the staged rows. {columns}
    lists all columns, {key} the columns of the key, and {sums} the sums of the other columns. {order} is an ``order
    by`` of the key, or empty without a key."""
    conflict: Conflict | None
    """How rows with the same key are resolved; None if the mode only inserts. Rows that a trigger keeps out are found by
    their keys. If the mode only inserts, they are counted by the number of rows that PostgreSQL inserted."""
    needs_key: bool
    """Rows are found by their key. The target needs a unique index on it and may have no rules, and the staged keys may
    be neither NULL nor rounded."""
    one_row_a_key: bool
    """A merge is refused if two staged rows have the same key, because the merge cannot know which of them is right."""
    sums: bool
    """The columns outside the key are summed. There must be such a column, and none may round the sum of a batch."""
    deletes_touched: bool
    """Rows of the target whose ids are in the batch are deleted if no row is staged for them. The id is the end
    of the key. Every staged row must have an id of the batch. Row security must not hide rows of the target."""
    copies_rows: bool
    """The staged rows are unchanged rows of another table. A refusal then does not advise leaving out a column, as the
    copy would be incomplete."""

    def __post_init__(self) -> None:
        if self.conflict is not None and not self.needs_key:
            raise TypeError("a mode that resolves conflicts needs a key")


OVERWRITE = Conflict(
    assigned="{0} = excluded.{0}",
    unchanged="t.{0}{2} is not distinct from s.{0}::{1}{2}",
    idempotent=True,
)
SUM = Conflict(
    assigned="{0} = coalesce(t.{0} + excluded.{0}, t.{0}, excluded.{0})",
    unchanged="coalesce(t.{0} + s.{0}, t.{0}, s.{0}) is not distinct from t.{0}",
    idempotent=False,
)


def complete(table: Mapping[Mode, Behaviour]) -> Mapping[Mode, Behaviour]:
    """Return the table, read-only. Raises TypeError if a mode has no entry."""
    if missing := [mode for mode in Mode if mode not in table]:
        raise TypeError(f"no behaviour is stated for the modes {', '.join(missing)}")
    return MappingProxyType(dict(table))


BEHAVIOURS = complete(
    {
        Mode.ADD: Behaviour(
            privileges=("select", "insert", "update"),
            selected="select {key}, {sums} from ({rows}) s group by {key} {order}",
            conflict=SUM,
            needs_key=True,
            one_row_a_key=False,
            sums=True,
            deletes_touched=False,
            copies_rows=False,
        ),
        Mode.REPLACE: Behaviour(
            privileges=("select", "insert", "update"),
            selected="select {columns} from ({rows}) s {order}",
            conflict=OVERWRITE,
            needs_key=True,
            one_row_a_key=True,
            sums=False,
            deletes_touched=False,
            copies_rows=False,
        ),
        Mode.MIRROR: Behaviour(
            privileges=("select", "insert", "update", "delete"),
            # A row that was changed twice in the batch is staged twice.
            selected="select distinct on ({key}) {columns} from ({rows}) s {order}",
            conflict=OVERWRITE,
            needs_key=True,
            one_row_a_key=False,
            sums=False,
            deletes_touched=True,
            copies_rows=True,
        ),
        Mode.APPEND: Behaviour(
            privileges=("insert",),
            selected="select {columns} from ({rows}) s {order}",
            conflict=None,
            needs_key=False,
            one_row_a_key=False,
            sums=False,
            deletes_touched=False,
            copies_rows=False,
        ),
    }
)
