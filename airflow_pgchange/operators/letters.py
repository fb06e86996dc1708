"""Dead letters: sent again or dropped by a DAG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseOperator

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.checks import Seconds
from airflow_pgchange.hooks.pgchange import PgChangeHook, both
from airflow_pgchange.utils.arguments import CheckedArguments, checks, maybe, one_of

if TYPE_CHECKING:
    from airflow.sdk import Context

Action = Literal["redrive", "drop"]


def _numbers(name: str, given: Sequence[int | str] | str) -> list[int]:
    texts = given.strip("[] ").split(",") if isinstance(given, str) else given
    try:
        return [int(each) for each in texts if str(each).strip()]
    except ValueError as error:
        raise InvalidArgument(f"{name} must be numbers, not {given!r}") from error


class DeadLettersOperator(CheckedArguments, BaseOperator):
    """Sends dead letters again, or drops them: those of a consumer, older than an age, or by number.

    A letter goes to the consumer that gave it up, and to nobody else. Once, however often this task runs: exactly once or
    at least once, as the operator that processes it says. Letters that can no longer be sent, for their history was
    trimmed or their source restored, are left, and logged.

    :param action: ``redrive`` or ``drop`` (templated)
    :param consumer: only letters of this consumer, as ``airflow pgchange status`` names it (templated)
    :param older_than: only letters that were given up longer ago, such as ``7 days`` (templated)
    :param letter_ids: these letters and no other, all or none of them (templated)
    :param postgres_conn_id: the database of the letters: that of the results for the commit queue, the event log and the
        topology, its own for a tube or a message queue; with a role that may give up the consumer's batches
    :param source_conn_id: the database that holds the changes, where it is another one; default: the same
    """

    arguments = checks(
        "consumer",
        "older_than",
        "postgres_conn_id",
        "source_conn_id",
        action=one_of(Action),
        letter_ids=maybe(_numbers),
    )
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        action: Action,
        consumer: str | None = None,
        older_than: Seconds | None = None,
        letter_ids: Sequence[int | str] | str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.action = action
        self.consumer = consumer
        self.older_than = older_than
        self.letter_ids: Any = letter_ids
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns ``{action, letters}``, with the numbers of the letters that were sent or dropped."""
        ids = self.letter_ids or ()
        asked: dict[str, Any] = {"consumer": self.consumer, "older_than": self.older_than}
        asks_source = None if self.action == "drop" else self.source_conn_id
        with both(self.postgres_conn_id, asks_source) as (connection, source):
            if self.action == "drop":
                done = dead_letters.drop_letters(connection, ids=ids, **asked)
            else:
                done = dead_letters.redrive(connection, source, ids=ids, **asked)
                if not ids:
                    self._tell_of_others(dead_letters.letters(connection, source, **asked))
        self.log.info("%s: %d letters", self.action, len(done))
        return {"action": self.action, "letters": done}

    def _tell_of_others(self, left: Sequence[dead_letters.Letter]) -> None:
        for letter in left:
            if letter.hindrance is not None:
                self.log.warning(
                    "letter %d of %s, %d changes, cannot be sent again: %s",
                    letter.id,
                    letter.consumer,
                    letter.changes,
                    letter.hindrance,
                )
