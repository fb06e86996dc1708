"""The note of an action in Airflow's audit log: what the API has understood of a request, and nothing else of it."""

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
    """Note an action in the audit log before it is done. ``body`` is the model of the parameter ``asked`` of its route.

    Airflow notes a body only if its content type is spelt in one way, and FastAPI accepts other spellings and types. It
    also notes fields that no action reads, which could replace those that are read. So Airflow gets the request as the
    action understands it.

    The note is committed before the action is done. Airflow 3.1 leaves that to the end of the request, and would roll
    the note back if the action is refused. Later versions commit it themselves.
    """
    log_action = action_logging(event)

    async def log(fields: dict[str, Any], request: Request, session: SessionDep, user: GetUserDep) -> None:
        await log_action(_understood(request, fields), session, user)
        await run_in_threadpool(session.commit)

    async def note(request: Request, session: SessionDep, user: GetUserDep) -> None:
        await log({}, request, session, user)

    async def note_with_body(asked: Any, request: Request, session: SessionDep, user: GetUserDep) -> None:
        await log(asked.model_dump(mode="json"), request, session, user)

    if body is None:
        return Depends(note)
    note_with_body.__annotations__["asked"] = body
    return Depends(note_with_body)


def _understood(request: Request, fields: dict[str, Any]) -> Request:
    """A request of the same path and source that has these fields."""
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
