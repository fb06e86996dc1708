"""The retry policy of the package's operators and sensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_pgchange.errors import Permanent
from airflow_pgchange.utils.compat import RetryDecision, RetryPolicy

if TYPE_CHECKING:
    from airflow.sdk import Context


class UnlessPermanent(RetryPolicy):
    """Retry as often as the task's ``retries`` allow, but not after a permanent error, which a person has to fix."""

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        if isinstance(exception, Permanent):
            return RetryDecision.fail("a retry cannot fix this error: do what the error says")
        return RetryDecision.default()

    def serialize(self) -> dict[str, Any]:
        return {}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> UnlessPermanent:
        return cls()
