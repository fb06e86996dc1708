"""Which error of this package an error of PostgreSQL or its driver stands for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from airflow_pgchange.errors import (
    ApplicationFailed,
    BatchGivenUp,
    BatchIncomplete,
    BatchNotFinished,
    ConsumerBusy,
    DispatchEnded,
    HistoryTrimmed,
    InvalidArgument,
    Leased,
    LetterRefused,
    MergeRefused,
    PermissionDenied,
    PgChangeError,
    PoisonousChange,
    Refused,
    SchemaMissing,
    ServerUnavailable,
    SourceLostTail,
    SourceRestored,
    StaleClaim,
    TransactionNotClean,
    UnknownBranch,
    UnknownConsumer,
    UnknownLetter,
    UnsupportedType,
)
from airflow_pgchange.feeds import grants
from airflow_pgchange.feeds.extensions import EXTENSIONS
from airflow_pgchange.feeds.refused_statements import refused_statement
from airflow_pgchange.feeds.schemas import schema_in

OF_A_BATCH = (ApplicationFailed, BatchIncomplete, MergeRefused, UnsupportedType)


def is_of_the_batch(error: BaseException) -> bool:
    """Whether the content of the batch may have caused the error, and not a server, a right, a version or a disk."""
    if isinstance(error, PgChangeError):
        return isinstance(error, OF_A_BATCH)
    return not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | OSError | MemoryError)


BY_SQLSTATE: dict[str, type[PgChangeError]] = {
    "PC001": UnknownBranch,
    "PC002": UnknownConsumer,
    "PC003": SourceLostTail,
    "PC004": SourceRestored,
    "PC005": HistoryTrimmed,
    "PC006": StaleClaim,
    "PC007": TransactionNotClean,
    "PC008": Refused,
    "PC009": BatchNotFinished,
    "PC010": BatchGivenUp,
    "PC011": UnknownLetter,
    "PC012": LetterRefused,
    "PC013": DispatchEnded,
    "PC014": PoisonousChange,
    "PC015": Leased,
    "22023": InvalidArgument,
    "25P03": ServerUnavailable,
    "42501": PermissionDenied,
    "3F000": SchemaMissing,
    "42P01": SchemaMissing,
    "42883": SchemaMissing,
    "55P03": ConsumerBusy,
    "25006": ServerUnavailable,
}

ADVICE: dict[type[PgChangeError], str] = {
    SchemaMissing: "run `airflow-pgchange install` on this database, or airflow_pgchange.admin.install()",
    PermissionDenied: "let its owner grant the right, or run it as its owner",
    ServerUnavailable: "check host, port and that the server accepts connections, then try again",
}

TAKES_NO_WRITES = (
    "connect to a server that takes writes; if it is a primary, default_transaction_read_only is on: turn it off for the "
    "role (`alter role <role> set default_transaction_read_only = off`)"
)
CANCELLED_BY_STANDBY = (
    "the standby had to replay changes to data that the query was reading: try again; if it happens often, raise its "
    "max_standby_streaming_delay, set hot_standby_feedback, or read from the primary"
)

log = logging.getLogger(__name__)

REFUSED = "the server answered and refused: check database, role and password"


def from_postgres(error: psycopg.Error) -> PgChangeError | None:
    """Return our error for an error of psycopg; None if a user's own SQL failed."""
    state = error.sqlstate or ""
    kind = BY_SQLSTATE.get(state)
    if (
        kind is None
        and isinstance(error, psycopg.OperationalError)
        and state[:3] in ("", "080", "57P", "533")
    ):
        kind = ServerUnavailable
    if _is_standby_conflict(error):
        return ServerUnavailable(f"{error.diag.message_primary}: {CANCELLED_BY_STANDBY}")
    message = error.diag.message_primary or str(error).strip() or type(error).__name__
    if kind is None or (kind is SchemaMissing and schema_in(message) is None):
        return None
    if kind is PermissionDenied:
        return PermissionDenied(_denied(error, message))
    hint = error.diag.message_hint or _advice(kind, message)
    return kind(f"{message}: {hint}" if hint else message)


def _denied(error: psycopg.Error, message: str) -> str:
    """Return the text for a missing right: a line with the role that lacks it, and a line with the grant to run."""
    if error.diag.message_hint:
        return f"{message}:\n{error.diag.message_hint}"
    refused = refused_statement(error)
    if refused is None:
        return f"{message}:\n{ADVICE[PermissionDenied]}"
    grant = grants.advice(message, f"{refused.text}\n{error.diag.context or ''}", refused.role)
    return f"{message}, role {refused.role}:\n{grant or ADVICE[PermissionDenied]}"


def _is_standby_conflict(error: psycopg.Error) -> bool:
    """Whether a standby cancelled a statement or ended a session because of a conflict with replay.

    The text of the error may be in any language. Therefore its source file is checked: from other files the same SQLSTATE
    is a conflict of two serializable transactions.
    """
    return error.sqlstate == "40001" and error.diag.source_file == "postgres.c"


def _advice(kind: type[PgChangeError], message: str) -> str | None:
    if kind is ServerUnavailable and "read-only" in message:
        return TAKES_NO_WRITES
    if "FATAL:" in message:
        return REFUSED
    extension = EXTENSIONS.get(schema_in(message) or "") if kind is SchemaMissing else None
    if extension is not None:
        return f"{ADVICE[kind]}; where the server has no {extension}, install postgresql-contrib there first"
    return ADVICE.get(kind)


def shorten(error: BaseException) -> None:
    """Cut from an error of PostgreSQL the lines of functions that it came through. They are logged at level debug."""
    if not isinstance(error, psycopg.Error):
        return
    text, context, _ = str(error).partition("\nCONTEXT:")
    if context:
        log.debug("%s: %s", text, error.diag.context)
        error.args = (text, *error.args[1:])


@contextmanager
def translated() -> Iterator[None]:
    """Turn psycopg's errors of our own statements into our errors."""
    try:
        yield
    except psycopg.Error as error:
        shorten(error)
        ours = from_postgres(error)
        if ours is None:
            raise
        raise ours from error
    except psycopg.Rollback as error:
        # psycopg raises Rollback here if the connection was lost inside the block.
        raise ServerUnavailable(f"the connection was lost: {ADVICE[ServerUnavailable]}") from error
