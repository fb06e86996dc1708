"""The SQL statements that the relay accepts: health checks, and the session resets of connection pools."""

from __future__ import annotations

import re
from dataclasses import dataclass

from airflow_pgchange.topology.replies import ONE, VOID, Column

PART = re.compile(r"\s+|--[^\n]*|'[^']*'|[(),=*;]|[^\s(),=*;'-]+|.", re.DOTALL)
"""Tokens of a query. The alternatives begin with different characters, so the match never backtracks and takes linear
time: a malicious query cannot block the other clients."""
NAME = r"[a-z_][\w.]*"
VALUE = r"(?:'[^']*'|(?:- )?[\w.]+)"


@dataclass(frozen=True)
class Statement:
    """PostgreSQL's answer to a statement: the command tag, and the column of its row if it returns one.

    ``forgets``: the statement drops the client's prepared statements.
    """

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
    # The relay sends UTF-8 only, so other encodings are refused.
    (r"set (?:session )?client_encoding (?:to|=) '?utf-?8'?", Statement("SET")),
    (rf"set (?:session )?(?!client_encoding\b){NAME} (?:to|=) {VALUE}(?: , {VALUE})*", Statement("SET")),
    (r"(?:rollback|abort)(?: work| transaction)?", Statement("ROLLBACK")),
)


def selected(query: str) -> list[Statement] | None:
    """Return the statements of a query, an empty list for an empty query; None if any statement is not accepted."""
    statements: list[Statement] = []
    words: list[str] = []
    for part in [*PART.findall(query), ";"]:
        if part != ";":
            if not (part.isspace() or part.startswith("--")):
                words.append(part.lower())
        elif words:
            statement = _known(" ".join(words))
            if statement is None:
                return None
            statements.append(statement)
            words = []
    return statements


def _known(text: str) -> Statement | None:
    return next((statement for pattern, statement in KNOWN if re.fullmatch(pattern, text)), None)
