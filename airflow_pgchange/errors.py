"""The errors of this package. Each class says when it is raised and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AirflowUnavailable",
    "ApplicationFailed",
    "BatchGivenUp",
    "BatchIncomplete",
    "BatchNotFinished",
    "ClientRefused",
    "ConnectionLost",
    "ConsumerBusy",
    "DispatchEnded",
    "ExtraMissing",
    "HandlerFailed",
    "HistoryTrimmed",
    "InvalidArgument",
    "LetterRefused",
    "MergeRefused",
    "NotPublished",
    "Permanent",
    "PermissionDenied",
    "PgChangeError",
    "PublisherFull",
    "Refused",
    "SchemaMissing",
    "SchemaVersionMismatch",
    "ServerUnavailable",
    "SourceLostTail",
    "SourceRestored",
    "StaleClaim",
    "Stopped",
    "TooManyClients",
    "TransactionNotClean",
    "UnknownBranch",
    "UnknownConsumer",
    "UnknownLetter",
    "UnsupportedType",
    "VersionsDiffer",
    "WebhookFailed",
]


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
