"""When a task is tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_pgchange.errors import Permanent
from airflow_pgchange.utils.compat import RetryDecision, RetryPolicy

if TYPE_CHECKING:
    from airflow.sdk import Context


class UnlessPermanent(RetryPolicy):
    """Try again as ``retries`` say, but not what a person has to mend first."""

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        if isinstance(exception, Permanent):
            return RetryDecision.fail("no other try mends it: see what the error says")
        return RetryDecision.default()

    def serialize(self) -> dict[str, Any]:
        return {}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> UnlessPermanent:
        return cls()
