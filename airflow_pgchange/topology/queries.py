"""Answers to the few queries that psql and connection pools send on their own, such as health checks."""

from __future__ import annotations

from airflow_pgchange.errors import ClientRefused
from airflow_pgchange.topology import replies
from airflow_pgchange.topology.frames import Fields
from airflow_pgchange.topology.statements import Statement, selected

MOST_NAMES = 100
"""Maximum number of prepared statements, and of portals, of one client."""
NO_SQL = "this connection is for topology events, and accepts no SQL but `select 1`"


class Queries:
    """Answers one client's queries in the simple and in the extended protocol.

    A prepared statement that is None is an empty query.
    """

    def __init__(self) -> None:
        self._statements: dict[str, Statement | None] = {}
        self._portals: dict[str, tuple[Statement | None, int]] = {}
        self._failed = False

    def answer(self, kind: bytes, body: bytes) -> bytes:
        """Return the reply to one message. Raises ClientRefused for a malformed one, which ends the connection."""
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
            raise ClientRefused("08P01", f"a message of kind {kind!r}, which is not supported")
        return step(Fields(body))

    def _query(self, fields: Fields) -> bytes:
        query = fields.string()
        fields.end()
        statements = selected(query)
        if statements is None:
            return replies.error("0A000", NO_SQL)
        return b"".join(_described(each) + self._run(each) for each in statements) or replies.EMPTY

    def _parse(self, fields: Fields) -> bytes:
        name, query = fields.name(), fields.string()
        statements = selected(query)
        if statements is None:
            return self._fail("0A000", NO_SQL)
        if len(statements) > 1:
            return self._fail("42601", "cannot insert multiple commands into a prepared statement")
        if len(self._statements.keys() | {name}) > MOST_NAMES:
            return self._fail("54000", f"more than {MOST_NAMES} prepared statements")
        self._statements[name] = statements[0] if statements else None
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
            return replies.NO_PARAMETERS + (_described(self._statements[name]) or replies.NO_DATA)
        if kind == b"P" and name in self._portals:
            return _described(*self._portals[name]) or replies.NO_DATA
        return self._fail("26000", f"there is nothing {name!r} to describe")

    def _execute(self, fields: Fields) -> bytes:
        name = fields.name()
        if name not in self._portals:
            return self._fail("34000", f"there is no portal {name!r}")
        statement, format = self._portals[name]
        return replies.EMPTY if statement is None else self._run(statement, format)

    def _close(self, fields: Fields) -> bytes:
        kind, name = fields.take(1), fields.name()
        (self._statements if kind == b"S" else self._portals).pop(name, None)
        return replies.CLOSED

    def _run(self, statement: Statement, format: int = 0) -> bytes:
        if statement.forgets:
            self._statements.clear()
        row = b"" if statement.column is None else replies.row(statement.column, format)
        return row + replies.complete(statement.tag)

    def _fail(self, sqlstate: str, message: str) -> bytes:
        self._failed = True
        return replies.error(sqlstate, message)


def _described(statement: Statement | None, format: int = 0) -> bytes:
    """Return the RowDescription of a statement; no bytes if it returns no row."""
    if statement is None or statement.column is None:
        return b""
    return replies.described(statement.column, format)
