"""A sensor that waits for the end of a saga."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseSensorOperator, PokeReturnValue

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, checks

if TYPE_CHECKING:
    from airflow.sdk import Context

NUMBER = re.compile("[0-9]{1,18}")


def _number(name: str, value: Any) -> int:
    # Accept an int (from XCom) or its text (from a template); reject bool and float.
    digits = str(value).strip() if type(value) in (int, str) else ""
    if not NUMBER.fullmatch(digits):
        raise InvalidArgument(
            f"{name} must be the number of a saga, as StartSagaOperator returns it, not {value!r:.300}"
        )
    return int(digits)


class SagaSensor(CheckedArguments, BaseSensorOperator):
    """Waits until a saga is complete. Fails without retries if the saga is rolled back.

    The handlers or maintenance roll a saga back if its steps are not all done at its deadline. Give the sensor a
    ``timeout`` anyway: a saga may have no deadline (``Saga(timeout=None)``), and a compensation that fails is retried
    without end. The sensor logs a warning while the saga is stuck.

    :param saga: the number of the saga, such as the XCom of StartSagaOperator (templated)
    :param postgres_conn_id: the database of the queues
    :param kwargs: the arguments of any sensor, such as ``poke_interval`` and ``timeout``; the default mode is reschedule
    """

    arguments = checks("postgres_conn_id", saga=_number)
    template_fields: Sequence[str] = tuple(arguments)

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
            saga = ask(connection, select("mbus.saga_state", self.saga))
        if saga is None:
            raise AirflowFailException(
                f"there is no saga {self.saga}: maintenance has deleted it, or it is in another database"
            )
        name = f"saga {saga['name']} {saga['id']}"
        if saga["state"] == "rolled back":
            raise AirflowFailException(f"{name} was rolled back: {saga['reason']}")
        if saga["stuck"] is not None:
            self.log.warning("%s is stuck: %s", name, saga["stuck"])
        self.log.info("%s: %s; to do: %s", name, saga["state"], ", ".join(saga["to_do"]) or "nothing")
        return PokeReturnValue(saga["state"] == "complete", saga["done"])
