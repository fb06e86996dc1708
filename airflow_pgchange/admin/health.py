"""What a person should look at, of every feed, with what mends it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import warned

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """Something that a person should look at.

    ``severity``: ``error`` where changes do not come or are lost, ``warning`` for what may lead there. ``consumer``: whom
    it is about, as status names it, if it is one. ``call``: what mends it, in SQL or for the shell, and as whom; None
    where that is not one call.
    """

    kind: str
    severity: str
    consumer: str | None
    told: str
    call: str | None

    def __str__(self) -> str:
        about = "" if self.consumer is None else f"{self.consumer}: "
        return about + self.told + ("" if self.call is None else f"; {self.call}")


HEALTH = """
    select * from pgchange.health(array(
        select s from jsonb_populate_recordset(null::pgchange.consumer_status, %s) as s))
"""


def findings(
    connection: psycopg.Connection[Any],
    warn: Callable[[str], None] = log.warning,
    standing: Sequence[Mapping[str, Any]] | None = None,
) -> list[Finding]:
    """What ``pgchange.health()`` tells this role; ``warn`` is told of what the role may not see. ``standing``: the rows
    of ``status()``, for who has asked for them already."""
    with translated(), warned(connection, warn), connection.cursor(row_factory=class_row(Finding)) as cursor:
        if standing is None:
            return cursor.execute("select * from pgchange.health()").fetchall()
        rows = json.dumps([dict(row) for row in standing], default=str)
        return cursor.execute(HEALTH, [rows]).fetchall()
