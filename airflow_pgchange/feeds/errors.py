"""The one tree of errors. Each class says when it is raised and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from airflow_pgchange.feeds.extensions import EXTENSIONS
from airflow_pgchange.feeds.schemas import GRANTS, REVOKED, schema_in


class PgChangeError(Exception):
    """Base of every error that this package raises on purpose."""


class Permanent(PgChangeError):
    """What no other try mends: a person has to. A task that fails on one is not tried again by its ``retries``."""


class InvalidArgument(Permanent, ValueError):
    """A value that was given cannot be used. Correct it as the message says."""


class UnknownBranch(Permanent):
    """The feed names a branch that ``revision.branch`` does not have.

    Use an id that ``select id, type, tbl from revision.branch`` lists, or the one that ``revision.track`` returned.
    """


class UnknownConsumer(PgChangeError):
    """No consumer, tube or backfill has this name. List them with ``airflow pgchange status``."""


class ConsumerBusy(PgChangeError):
    """Another transaction holds this consumer's lock, or transactions at work on a table do not end in time. Wait, skip
    or fail, as the caller chose."""


class TransactionNotClean(PgChangeError):
    """The consumer transaction already wrote something, or is not READ COMMITTED.

    A transaction with an id of its own would take its own changes for processed. Claim first, write afterwards.
    """


class StaleClaim(PgChangeError):
    """The watermark is not where the claim found it: someone moved the consumer, or other workers share the tube now.
    Nothing was written; claim again, or make the feeds anew as the message says."""


class BatchIncomplete(PgChangeError):
    """A reader found another number of changes than the batch counts. Nothing was written; the batch is tried again."""


class BatchNotFinished(PgChangeError):
    """The transaction was left without ``ack``, or asked for a second batch: one batch, one transaction, one ack.
    Or a batch or a control pod is not in work any more: somebody else has finished it; or a restored consumer is behind
    what its source knows, as the message says."""


class ConnectionLost(PgChangeError):
    """The consumer's connection died while the batch was in work. Nothing was written; the batch is tried again."""


class Stopped(PgChangeError):
    """The caller asked to stop. What was committed before stays; nothing of what was in work was kept."""


class BatchGivenUp(Permanent):
    """A batch failed as often as it may. Mend what it fails on, or ``airflow pgchange skip`` it into the dead letters;
    nothing was lost."""


class UnknownLetter(Permanent):
    """There is no dead letter of this number, or none that this role may see. ``airflow pgchange letters list`` shows
    those that are there."""


class LetterRefused(Permanent):
    """A dead letter that cannot be sent again: it is on its way already, or void. The message says which."""


class SourceLostTail(Permanent):
    """The watermark is ahead of the mark at the source: the source lost its latest transactions.

    A crash or an asynchronous failover did it. ``airflow pgchange repair`` starts again from the mark that survived;
    from there on changes come at least once.
    """


class SourceRestored(Permanent):
    """The source is a restored or upgraded copy, in which transaction ids mean something else.

    The message says what to run in the source: ``select pubsub.rebase_after_restore()`` for a commit queue,
    ``tube.rebase_after_restore('<tube>')``, as the owner of the pods, for a tube, ``mbus.rebase_after_restore()`` for
    message queues; then ``airflow pgchange repair`` for consumers whose watermark lives elsewhere.
    """


class HistoryTrimmed(Permanent):
    """A consumer that is new, or whose results were restored, would miss what was trimmed, or a dead letter stands for
    some. Accept that with ``accept_trimmed=True``, or as the hint says, and drop the letter; or restore it."""


class Refused(PgChangeError):
    """The database refuses what was asked of it, such as a table that cannot be captured. The message says why, and what
    to do."""


class SchemaMissing(Permanent):
    """The database lacks our schemas. Run ``airflow pgchange install``."""


class SchemaVersionMismatch(Permanent):
    """The database holds another version of our schemas than this package needs. Run ``airflow pgchange upgrade``."""


class PermissionDenied(Permanent):
    """The role lacks a right. ``pubsub.grant_consumer``, ``revision.grant_owner``, ``tube.grant_consumer``,
    ``pgmb.grant_consumer``, ``mbus.grant_admin``, ``topology.grant_reader`` and others like them give what each role
    needs."""


class ServerUnavailable(PgChangeError):
    """PostgreSQL cannot be reached, or ended the connection. Check host, port and server, then try again."""


class AirflowUnavailable(PgChangeError):
    """Airflow did not return a connection in time, so PostgreSQL was not asked. Look at Airflow's metadata database."""


class NotPublished(PgChangeError):
    """Events that a publisher could not send: its list ``events`` has them. Mend them, or publish them again."""

    def __init__(self, message: str, events: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.events = list(events)


class PublisherFull(PgChangeError):
    """As many events wait to be published as the publisher may keep. Put fewer, wait, or give it more memory."""


class ClientRefused(PgChangeError):
    """A client that the topology relay does not serve: it is told why and, in ``hint``, what to do, and let go."""

    def __init__(self, sqlstate: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.hint = hint


class HandlerFailed(PgChangeError):
    """A handler that is not to be tried again failed, or its calls do not end. Mend it; its events come again."""


class WebhookFailed(PgChangeError):
    """The receiver of a webhook did not take events, or has an address that is refused. They are tried again."""


class TooManyClients(PgChangeError):
    """As many clients are connected to streams of events as may be, or the streams end. Connect again later."""


class DispatchEnded(PgChangeError):
    """Dispatching events was ended by a limit of time, or by somebody: the message names the condition that it was at, or
    says that it was at none. Change or delete the subscriptions that have it if it is too slow; nothing is lost."""


class ExtraMissing(Permanent, ImportError):
    """An optional part needs packages that are not installed: the message says how to install them."""


class VersionsDiffer(Permanent):
    """Packages that share their files are installed in two versions: the message says how to make them one."""


class ApplicationFailed(PgChangeError):
    """An application beside a Spark Connect server did not end well: the task's log has what it said. Nothing was
    written; the batch is tried again."""


class MergeRefused(PgChangeError):
    """Staged results do not fit their target (columns, key, duplicates, counts). Nothing was written."""


class UnsupportedType(Permanent):
    """A column's type, or a value in it, has no exact counterpart in the other system. Cast it as the message says."""


OF_A_BATCH = (ApplicationFailed, BatchIncomplete, MergeRefused, UnsupportedType)


def is_of_the_batch(error: BaseException) -> bool:
    """Whether an attempt may have failed on what is in its batch: not on a server, a right, a version or a disk."""
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
    SchemaMissing: "run `airflow pgchange install` on this database, or airflow_pgchange.admin.schema.install()",
    PermissionDenied: "let its owner grant it; the guide to roles says who needs what",
    ServerUnavailable: "check host, port and that the server accepts connections, then try again",
}

TAKES_NO_WRITES = (
    "connect to a server that takes writes; if it is a primary, default_transaction_read_only is on: turn it off for the "
    "role (`alter role <role> set default_transaction_read_only = off`)"
)
CANCELLED_BY_STANDBY = (
    "the standby had to replay changes of what was read: try again; if it happens often, raise its "
    "max_standby_streaming_delay, set hot_standby_feedback, or read from the primary"
)

DENIED = re.compile(r"for (?:schema|function) (\w+)")

REFUSED = "the server answered and refused: check database, role and password"


def from_postgres(error: psycopg.Error) -> PgChangeError | None:
    """The error of this tree that a driver's error stands for; None where it is a user's own SQL that failed."""
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
    hint = error.diag.message_hint or _advice(kind, message)
    return kind(f"{message}: {hint}" if hint else message)


def _is_standby_conflict(error: psycopg.Error) -> bool:
    """Whether a standby cancelled a statement, or ended a session, because of what it replays. Its text has any language;
    the same SQLSTATE from elsewhere in PostgreSQL is a conflict of two serializable transactions."""
    return error.sqlstate == "40001" and error.diag.source_file == "postgres.c"


def _advice(kind: type[PgChangeError], message: str) -> str | None:
    if kind is ServerUnavailable and "read-only" in message:
        return TAKES_NO_WRITES
    if "FATAL:" in message:
        return REFUSED
    extension = EXTENSIONS.get(schema_in(message) or "") if kind is SchemaMissing else None
    if extension is not None:
        return f"{ADVICE[kind]}; where the server has no {extension}, install postgresql-contrib there first"
    denied = DENIED.search(message) if kind is PermissionDenied else None
    if denied is not None and denied[1].startswith("pg_"):
        return REVOKED.format(denied[1])
    if denied is None or denied[1] not in GRANTS:
        return ADVICE.get(kind)
    return f"let the owner of the schema run it: {GRANTS[denied[1]]}; the guide to roles says who needs what"


@contextmanager
def translated() -> Iterator[None]:
    """Turn the driver's errors about our own statements into this tree."""
    try:
        yield
    except psycopg.Error as error:
        ours = from_postgres(error)
        if ours is None:
            raise
        raise ours from error
    except psycopg.Rollback as error:
        # What undoes a block in silence comes through where the connection was lost meanwhile.
        raise ServerUnavailable(f"the connection was lost: {ADVICE[ServerUnavailable]}") from error
