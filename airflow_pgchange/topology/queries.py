"""The little that the relay answers: an empty query and ``select 1``, so that psql and pools find it alive."""

from __future__ import annotations

import re

from airflow_pgchange.feeds.errors import ClientRefused
from airflow_pgchange.topology import replies
from airflow_pgchange.topology.protocol import Fields

# Each matches blanks in one way only: a second would cost the square of their number, and hold up all clients.
ONE = re.compile(r"\s*select\s+1\s*(?:;\s*)?", re.IGNORECASE)
EMPTY = re.compile(r"[\s;]*")
MOST_NAMES = 100
"""Statements and portals that a client may have at once."""
NO_SQL = "this connection hears of the topology and takes no SQL but `select 1`"


class Queries:
    """What one client asks, by the simple and the extended protocol."""

    def __init__(self) -> None:
        self._statements: dict[str, bool] = {}
        self._portals: dict[str, tuple[bool, int]] = {}
        self._failed = False

    def answer(self, kind: bytes, body: bytes) -> bytes:
        """The reply to one message. Raises ClientRefused for one that is malformed, which ends the connection."""
        if kind == b"S":
            self._failed = False
            self._portals.clear()
            return replies.READY
        if kind in b"Hcdf" or (self._failed and kind in b"PBDEC"):
            return b""
        if kind == b"Q":
            return self._query(Fields(body)) + replies.READY
        if kind == b"F":
            return replies.error("0A000", NO_SQL) + replies.READY
        steps = {
            b"P": self._parse,
            b"B": self._bind,
            b"D": self._describe,
            b"E": self._execute,
            b"C": self._close,
        }
        step = steps.get(kind)
        if step is None:
            raise ClientRefused("08P01", f"a message of kind {kind!r}, which has no meaning here")
        return step(Fields(body))

    def _query(self, fields: Fields) -> bytes:
        query = fields.string()
        fields.end()
        rows = selects_one(query)
        if rows is None:
            return replies.error("0A000", NO_SQL)
        if rows:
            return replies.one_described() + replies.one_row() + replies.ONE_SELECTED
        return replies.EMPTY

    def _parse(self, fields: Fields) -> bytes:
        name, query = fields.name(), fields.string()
        rows = selects_one(query)
        if rows is None:
            return self._fail("0A000", NO_SQL)
        if len(self._statements.keys() | {name}) > MOST_NAMES:
            return self._fail("54000", f"more than {MOST_NAMES} prepared statements")
        self._statements[name] = rows
        return replies.PARSED

    def _bind(self, fields: Fields) -> bytes:
        portal, name = fields.name(), fields.name()
        fields.int16s()
        for _ in range(fields.int16()):
            fields.take(max(fields.int32(), 0))
        formats = fields.int16s()
        fields.end()
        if name not in self._statements:
            return self._fail("26000", f"there is no prepared statement {name!r}")
        if len(self._portals.keys() | {portal}) > MOST_NAMES:
            return self._fail("54000", f"more than {MOST_NAMES} portals")
        self._portals[portal] = self._statements[name], formats[0] if formats else 0
        return replies.BOUND

    def _describe(self, fields: Fields) -> bytes:
        kind, name = fields.take(1), fields.name()
        if kind == b"S" and name in self._statements:
            described = replies.one_described() if self._statements[name] else replies.NO_DATA
            return replies.NO_PARAMETERS + described
        if kind == b"P" and name in self._portals:
            rows, format = self._portals[name]
            return replies.one_described(format) if rows else replies.NO_DATA
        return self._fail("26000", f"there is nothing {name!r} to describe")

    def _execute(self, fields: Fields) -> bytes:
        name = fields.name()
        if name not in self._portals:
            return self._fail("34000", f"there is no portal {name!r}")
        rows, format = self._portals[name]
        return replies.one_row(format) + replies.ONE_SELECTED if rows else replies.EMPTY

    def _close(self, fields: Fields) -> bytes:
        kind, name = fields.take(1), fields.name()
        (self._statements if kind == b"S" else self._portals).pop(name, None)
        return replies.CLOSED

    def _fail(self, sqlstate: str, said: str) -> bytes:
        self._failed = True
        return replies.error(sqlstate, said)


def selects_one(query: str) -> bool | None:
    """True for ``select 1``, False for an empty query, None for any other."""
    if EMPTY.fullmatch(query):
        return False
    return True if ONE.fullmatch(query) else None
