"""A sensor for the end of a saga."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException

from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.hooks.pgchange import PgChangeHook

if TYPE_CHECKING:
    from airflow.sdk import Context


class SagaSensor(BaseSensorOperator):
    """Waits until a saga is complete, and fails, without retries, once it is rolled back.

    A saga is one or the other at last, for it has a deadline, after which maintenance rolls it back. Where it is stuck
    meanwhile this is logged.

    :param saga: its number, such as the XCom of StartSagaOperator (templated)
    :param postgres_conn_id: the database of the queues
    :param kwargs: ``poke_interval``, ``timeout`` and so on, as any sensor has them; it reschedules by default
    """

    template_fields: Sequence[str] = ("saga", "postgres_conn_id")

    def __init__(
        self,
        *,
        saga: Any,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        mode: str = "reschedule",
        poke_interval: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode=mode, poke_interval=poke_interval, **kwargs)
        self.saga = saga
        self.postgres_conn_id = postgres_conn_id

    def poke(self, context: Context) -> PokeReturnValue:
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            found = ask(connection, select("mbus.saga_state", self._number()))
        if found is None:
            raise AirflowFailException(
                f"there is no saga {self.saga}: it was forgotten, or is another database's"
            )
        name = f"saga {found['name']} {found['id']}"
        if found["state"] == "rolled back":
            raise AirflowFailException(f"{name} was rolled back: {found['reason']}")
        if found["stuck"] is not None:
            self.log.warning("%s is stuck: %s", name, found["stuck"])
        self.log.info("%s: %s; to do: %s", name, found["state"], ", ".join(found["to_do"]) or "nothing")
        return PokeReturnValue(found["state"] == "complete", found["done"])

    def _number(self) -> int:
        try:
            return int(self.saga)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{self.task_id}: saga must be the number of one, as StartSagaOperator returns it, not {self.saga!r}"
            ) from error
