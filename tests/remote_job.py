"""A deferrable operator for the stand-in of a remote job API, like the operators of Kubernetes or Databricks."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent


def ask(api: str, action: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{api}/v1/submissions/{action}", data)) as answer:
        return json.load(answer)


class RemoteJobTrigger(BaseTrigger):
    def __init__(self, api: str, job: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.api, self.job = api, job

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.RemoteJobTrigger", {"api": self.api, "job": self.job}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            answer = await asyncio.to_thread(ask, self.api, f"status/{self.job}")
            if answer["driverState"] != "RUNNING":
                yield TriggerEvent(answer["driverState"])  # type: ignore[no-untyped-call]
                return
            await asyncio.sleep(0.1)


class RemoteJobOperator(BaseOperator):
    """Start a job with arguments, and defer until the job has ended."""

    template_fields: ClassVar[tuple[str, ...]] = ("arguments",)

    def __init__(self, *, api: str, arguments: Any, environment: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.api, self.arguments, self.environment = api, arguments, environment

    def execute(self, context: Any) -> None:
        body = {"appArgs": list(self.arguments), "environmentVariables": dict(self.environment)}
        job = ask(self.api, "create", body)["submissionId"]
        self.defer(trigger=RemoteJobTrigger(self.api, job), method_name="resume")

    def resume(self, context: Any, event: str) -> None:
        if event != "FINISHED":
            raise RuntimeError(f"the job ended with state {event}")
