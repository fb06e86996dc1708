"""The operator that sends dead letters again, drops them, or erases the data of a key from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseOperator

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.hooks.pgchange import PgChangeHook, both
from airflow_pgchange.utils.arguments import CheckedArguments, checks, maybe, one_of, text

if TYPE_CHECKING:
    import psycopg
    from airflow.sdk import Context

Action = Literal["redrive", "drop", "erase"]


def _numbers(name: str, value: Sequence[int | str] | str) -> list[int]:
    texts = value.strip("[] ").split(",") if isinstance(value, str) else value
    try:
        return [int(each) for each in texts if str(each).strip()]
    except ValueError as error:
        raise InvalidArgument(f"{name} must be numbers, not {value!r}") from error


def _key(name: str, value: Any) -> str:
    """Return a key as text. A template that is rendered as a native object yields a number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else text(name, value)


class DeadLettersOperator(CheckedArguments, BaseOperator):
    """Sends dead letters again, drops them, or erases the data of a key from them.

    Letters are chosen by consumer, by age, or by number. A key is erased from all letters, or from those of a consumer.

    A letter is sent only to the consumer that gave it up, and only once, however often this task runs. The consumer then
    processes it with the guarantee of its operator. A letter cannot be sent if its history was trimmed or its source was
    restored. Such letters are left and logged.

    :param action: ``redrive``, ``drop`` or ``erase`` (templated)
    :param consumer: only letters of this consumer, as ``airflow-pgchange status`` names it (templated)
    :param older_than: only letters that were given up longer ago than this, such as ``7 days`` (templated)
    :param letter_ids: only the letters with these numbers; if one of them fails, none is sent or dropped (templated)
    :param key: the key to erase: the id of a message, an event or a row, or the value of ``field``. Airflow shows it
        among the task's rendered fields (templated)
    :param field: the name of the field that has the key as its value, as in ``customer.mail`` (templated)
    :param postgres_conn_id: the database of the letters. For the commit queue, the event log and the topology it is the
        database of the results. For a tube or a message queue it is the database of the tube or the queue. The role
        must have the right to give up the consumer's batches
    :param source_conn_id: the database that holds the changes; default: the same
    """

    arguments = checks(
        "consumer",
        "older_than",
        "postgres_conn_id",
        "source_conn_id",
        action=one_of(Action),
        letter_ids=maybe(_numbers),
        key=maybe(_key),
        field=maybe(text),
    )
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        action: Action,
        consumer: str | None = None,
        older_than: Seconds | None = None,
        letter_ids: Sequence[int | str] | str | None = None,
        key: str | None = None,
        field: str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.action = action
        self.consumer = consumer
        self.older_than = older_than
        self.letter_ids: Any = letter_ids
        self.key = key
        self.field = field
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        """Return ``{action, letters}``, with the numbers of the letters that were sent, dropped or erased from."""
        ids = self.letter_ids or ()
        choice: dict[str, Any] = {"consumer": self.consumer, "older_than": self.older_than}
        asks_source = self.source_conn_id if self.action == "redrive" else None
        with both(self.postgres_conn_id, asks_source) as (connection, source):
            self._check_choice()
            if self.action == "drop":
                done = dead_letters.drop_letters(connection, ids=ids, **choice)
            elif self.action == "erase":
                done = self._erase(connection)
            else:
                done = dead_letters.redrive(connection, source, ids=ids, **choice)
                if not ids:
                    self._tell_of_others(dead_letters.letters(connection, source, **choice))
        self.log.info("action %s: %d dead letters", self.action, len(done))
        return {"action": self.action, "letters": done}

    def _check_choice(self) -> None:
        """Raise InvalidArgument if the action has arguments of another action, or no key to erase."""
        if self.action != "erase":
            if self.key is not None or self.field is not None:
                raise InvalidArgument(
                    f"key and field can only be used with action='erase', not with {self.action!r}"
                )
        elif not self.key:
            raise InvalidArgument(
                "action='erase' needs a key: the id of a message, an event or a row, or the value of field"
            )
        elif self.letter_ids or self.older_than is not None:
            raise InvalidArgument(
                "action='erase' looks for the key in all letters, or in those of consumer: leave out letter_ids and "
                "older_than"
            )

    def _erase(self, connection: psycopg.Connection[Any]) -> list[int]:
        assert self.key is not None
        erased = dead_letters.erase_letters(connection, self.key, field=self.field, consumer=self.consumer)
        for letter in erased:
            self.log.info("letter %d: %d changes erased", letter.id, letter.erased)
        return [letter.id for letter in erased]

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
