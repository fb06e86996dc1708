"""Write actions to Airflow's audit log. An entry has the fields that the API reads, and nothing else of a request."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.api_fastapi.logging.decorators import action_logging
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.types import Message


def noted(event: str, body: type[BaseModel] | None = None) -> Any:
    """Return a dependency that writes an action to the audit log before the action is done.

    ``body`` is the model of the parameter ``payload`` of the route. Airflow logs a body only if its content type is spelt
    in one way, and FastAPI accepts other spellings and types. Airflow also logs fields that no action reads, which could
    replace fields that are read. So Airflow gets a request that has only the fields of the model.

    The entry is committed before the action is done. Airflow 3.1 commits at the end of the request, and would roll the
    entry back if the action is refused. Later versions commit the entry at once.
    """
    log_action = action_logging(event)

    async def log(fields: dict[str, Any], request: Request, session: SessionDep, user: GetUserDep) -> None:
        await log_action(_understood(request, fields), session, user)
        await run_in_threadpool(session.commit)

    async def note(request: Request, session: SessionDep, user: GetUserDep) -> None:
        await log({}, request, session, user)

    async def note_with_body(payload: Any, request: Request, session: SessionDep, user: GetUserDep) -> None:
        await log(payload.model_dump(mode="json"), request, session, user)

    if body is None:
        return Depends(note)
    note_with_body.__annotations__["payload"] = body
    return Depends(note_with_body)


def _understood(request: Request, fields: dict[str, Any]) -> Request:
    """Return a request with the same path and source, and with these fields."""
    content = json.dumps(fields).encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    source = request.query_params.get("source")
    query = "" if source is None else urlencode({"source": source})
    scope = {
        **request.scope,
        "query_string": query.encode(),
        "headers": [(b"content-type", b"application/json")],
    }
    return Request(scope, receive)
