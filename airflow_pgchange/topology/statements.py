"""The SQL that the relay knows: what asks whether it is alive, and what pools send of themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass

from airflow_pgchange.topology.replies import ONE, VOID, Column

PART = re.compile(r"\s+|--[^\n]*|'[^']*'|[(),=*;]|[^\s(),=*;'-]+|.", re.DOTALL)
"""Each begins in another way, and none is looked at twice: a client's query may hold up nobody."""
NAME = r"[a-z_][\w.]*"
VALUE = r"(?:'[^']*'|(?:- )?[\w.]+)"


@dataclass(frozen=True)
class Statement:
    """How PostgreSQL answers it: its tag, and its row if it has one. ``forgets`` what a client had prepared."""

    tag: str
    column: Column | None = None
    forgets: bool = False


KNOWN: tuple[tuple[str, Statement], ...] = (
    (r"select 1", Statement("SELECT 1", ONE)),
    (r"select (?:pg_catalog\.)?pg_advisory_unlock_all \( \)", Statement("SELECT 1", VOID)),
    (r"close all", Statement("CLOSE CURSOR ALL")),
    (r"unlisten \*", Statement("UNLISTEN")),
    (r"discard all", Statement("DISCARD ALL", forgets=True)),
    (r"discard plans", Statement("DISCARD PLANS")),
    (r"discard sequences", Statement("DISCARD SEQUENCES")),
    (r"discard temp(?:orary)?", Statement("DISCARD TEMP")),
    (r"deallocate all", Statement("DEALLOCATE ALL", forgets=True)),
    (rf"reset (?:session authorization|{NAME})", Statement("RESET")),
    (r"set session authorization default", Statement("SET")),
    (r"set session characteristics as transaction [a-z ,]+", Statement("SET")),
    (r"set role none", Statement("SET")),
    # What is said here is UTF-8, whatever somebody would like.
    (r"set (?:session )?client_encoding (?:to|=) '?utf-?8'?", Statement("SET")),
    (rf"set (?:session )?(?!client_encoding\b){NAME} (?:to|=) {VALUE}(?: , {VALUE})*", Statement("SET")),
    (r"(?:rollback|abort)(?: work| transaction)?", Statement("ROLLBACK")),
)


def selected(query: str) -> list[Statement] | None:
    """The statements of a query, none of an empty one; None where one of them is not known here."""
    found: list[Statement] = []
    words: list[str] = []
    for part in [*PART.findall(query), ";"]:
        if part != ";":
            if not (part.isspace() or part.startswith("--")):
                words.append(part.lower())
        elif words:
            statement = _known(" ".join(words))
            if statement is None:
                return None
            found.append(statement)
            words = []
    return found


def _known(said: str) -> Statement | None:
    return next((statement for pattern, statement in KNOWN if re.fullmatch(pattern, said)), None)
