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
    "OutcomeUnknown",
    "Permanent",
    "PermissionDenied",
    "PgChangeError",
    "PoisonousChange",
    "PublisherFull",
    "Refused",
    "SchemaMissing",
    "SchemaVersionMismatch",
    "ServerUnavailable",
    "SourceLostTail",
    "SourceRestored",
    "StagingOutdated",
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
    """An error that a retry cannot mend, so a person has to act. Airflow does not use the ``retries`` of a task that
    fails with it."""


class InvalidArgument(Permanent, ValueError):
    """A value cannot be used. Correct it as the message says."""


class UnknownBranch(Permanent):
    """The feed names a branch that ``revision.branch`` does not have.

    Use an id that ``select id, type, tbl from revision.branch`` lists, or the id that ``revision.track`` returned.
    """


class UnknownConsumer(PgChangeError):
    """No consumer, tube or backfill has this name. List them with ``airflow-pgchange status``."""


class ConsumerBusy(PgChangeError):
    """Another transaction holds this consumer's lock, or transactions at work on a table do not end in time. The caller
    chooses whether to wait, to skip or to fail."""


class Leased(ConsumerBusy):
    """The consumer's batch is leased: it is processed without the consumer's lock until the lease ends. Wait until then,
    or end the lease as the message says."""


class TransactionNotClean(PgChangeError):
    """The consumer transaction wrote something before it claimed, or is not READ COMMITTED.

    A transaction that writes gets a transaction id. It would then count its own changes as processed. Claim first, and
    write afterwards.
    """


class StaleClaim(PgChangeError):
    """The watermark is not where the claim found it: someone moved the consumer, or other workers share the tube now. Or
    a later attempt on the batch has begun after the lease ended. Nothing was written; claim again, or make the feeds anew
    as the message says."""


class BatchIncomplete(PgChangeError):
    """A reader found another number of changes than the claim had counted, or could not read a part of the batch in time.
    Nothing was written; the batch is tried again."""


class BatchNotFinished(PgChangeError):
    """The transaction ended without ``ack``, or claimed a second batch. Each batch needs a transaction and an ack of its
    own.

    It is also raised by the ack of a detached batch if no application has staged its results. Another cause is a batch
    or a control pod that another process has finished. The last cause is a restored consumer that is behind the
    progress that its source has recorded. The message names the cause.
    """


class ConnectionLost(PgChangeError):
    """The consumer's connection died while the batch was in work. Nothing was written; the batch is tried again."""


class Stopped(PgChangeError):
    """The caller asked to stop. Earlier batches stay committed; the batch in work was rolled back."""


class BatchGivenUp(Permanent):
    """A batch has failed ``max_attempts`` times and is not tried again. Nothing was lost.

    Correct the cause, or make it a dead letter with ``airflow-pgchange skip``.
    """


class PoisonousChange(BatchGivenUp):
    """A change has failed alone ``max_attempts`` times, by an error of its own.

    An operator with ``on_give_up="bisect"`` makes it a dead letter and continues. Otherwise correct the cause, or make it
    a dead letter with ``airflow-pgchange skip``.
    """


class UnknownLetter(Permanent):
    """There is no dead letter with this number, or this role may not see it. List the dead letters with
    ``airflow-pgchange letters list``."""


class LetterRefused(Permanent):
    """A dead letter cannot be sent again, because it has been sent already or is void. The message says which."""


class SourceLostTail(Permanent):
    """The consumer's watermark is ahead of the mark at the source: the source lost its latest transactions.

    The cause is a crash or an asynchronous failover. ``airflow-pgchange repair`` starts again from the mark that
    survived. Changes after that mark are delivered at least once.
    """


class SourceRestored(Permanent):
    """The source is a restored or upgraded copy, in which transaction ids mean something else.

    The message contains the statement to run in the source. It is ``select pubsub.rebase_after_restore()`` for a commit
    queue, and ``mbus.rebase_after_restore()`` for message queues. For a tube it is
    ``tube.rebase_after_restore('<tube>')``, as the owner of the pods. Then run ``airflow-pgchange repair`` for
    consumers whose watermark is in another database.

    It is also raised if a Delta table has another batch with the number of this batch. Then the database was restored
    to an earlier time than the table, and ``airflow-pgchange repair --delta`` lets the table accept the batch.
    """


class HistoryTrimmed(Permanent):
    """Changes that a consumer or a dead letter needs were trimmed from the source. The consumer is new, or its results
    were restored from a backup.

    Restore the changes; or do without them by ``accept_trimmed=True``, or as the hint says, and drop the dead letter.
    """


class Refused(PgChangeError):
    """The database refused a request, such as to capture a table that cannot be captured. The message says why, and what
    to do."""


class SchemaMissing(Permanent):
    """The database lacks our schemas. Run ``airflow-pgchange install``."""


class SchemaVersionMismatch(Permanent):
    """The database holds another version of our schemas than this package needs. Run ``airflow-pgchange upgrade``."""


class PermissionDenied(Permanent):
    """The role lacks a right. ``pubsub.grant_consumer``, ``revision.grant_owner``, ``tube.grant_consumer``,
    ``pgmb.grant_consumer``, ``mbus.grant_admin``, ``topology.grant_reader`` and others like them give what each role
    needs. Or a Spark Connect server refused the token of its connection."""


class ServerUnavailable(PgChangeError):
    """PostgreSQL, Spark or the catalog of a lake cannot be reached, or PostgreSQL ended the connection. Check host, port
    and server, then try again."""


class AirflowUnavailable(PgChangeError):
    """Airflow did not return a connection in time, so PostgreSQL was not asked. Look at Airflow's metadata database."""


class NotPublished(PgChangeError):
    """A publisher could not send the events in the list ``events``. Correct them, or publish them again."""

    def __init__(self, message: str, events: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.events = list(events)


class PublisherFull(PgChangeError):
    """The events that wait to be published take all of the publisher's ``memory``. Put fewer, wait, or raise
    ``memory``."""


class ClientRefused(PgChangeError):
    """The topology relay refuses a client. It sends the client the reason and, in ``hint``, what to do, and disconnects
    it."""

    def __init__(self, sqlstate: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.hint = hint


class HandlerFailed(PgChangeError):
    """A handler without retries failed, or the calls of a handler do not end. Correct the handler; its events come
    again."""


class WebhookFailed(PgChangeError):
    """The receiver of a webhook did not accept events, or its address is not allowed. The events are sent again."""


class TooManyClients(PgChangeError):
    """The streams of events have their maximum of clients, or are shutting down. Connect again later."""


class DispatchEnded(PgChangeError):
    """The dispatch of events was cancelled, by a time limit or by a person. Nothing is lost.

    The message names the condition that was being evaluated, if any. If that condition is too slow, change or delete
    the subscriptions that have it.
    """


class ExtraMissing(Permanent, ImportError):
    """An optional part of this package needs packages that are not installed. The message says how to install them."""


class VersionsDiffer(Permanent):
    """Two packages that share files are installed in different versions. The message says how to make the versions
    equal."""


class ApplicationFailed(PgChangeError):
    """An application beside a Spark Connect server failed. The task's log has its output. Nothing was written; the batch
    is tried again."""


class MergeRefused(PgChangeError):
    """Staged results do not fit their target (columns, key, duplicates, counts). Nothing was written."""


class StagingOutdated(PgChangeError):
    """Staged results can no longer be written. Their target was altered after they were staged, a crash of PostgreSQL
    has emptied their staging table, or their files are too old. Nothing was written; the batch is tried again, and is
    not split because of this error."""


class OutcomeUnknown(Permanent):
    """A table of a lake no longer shows whether it has a batch, because its snapshots or log of that time are gone.

    Nothing was written. Look for the rows of the batch in the table, and follow the message.
    """


class UnsupportedType(Permanent):
    """A column's type, or a value in it, has no exact counterpart in the other system. Cast it as the message says."""
