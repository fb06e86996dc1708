"""A sensor for the end of a saga."""

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


def _number(name: str, given: Any) -> int:
    # An XCom is a number, a template gives a text; a truth or a fraction is neither.
    digits = str(given).strip() if type(given) in (int, str) else ""
    if not NUMBER.fullmatch(digits):
        raise InvalidArgument(
            f"{name} must be the number of one, as StartSagaOperator returns it, not {given!r:.300}"
        )
    return int(digits)


class SagaSensor(CheckedArguments, BaseSensorOperator):
    """Waits until a saga is complete, and fails, without retries, once it is rolled back.

    Whose steps are not all done at its deadline is rolled back, by its handlers or by maintenance. But there are sagas
    without one (``Saga(timeout=None)``), and a compensation that fails is tried again for good: give a ``timeout`` as to
    any sensor. Where a saga is stuck this is logged.

    :param saga: its number, such as the XCom of StartSagaOperator (templated)
    :param postgres_conn_id: the database of the queues
    :param kwargs: ``poke_interval``, ``timeout`` and so on, as any sensor has them; it reschedules by default
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
            found = ask(connection, select("mbus.saga_state", self.saga))
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
