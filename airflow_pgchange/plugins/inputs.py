"""What a request may hold: text and numbers that PostgreSQL can take, of a length that fits what they are for."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field

FIELDS = 20
"""So many fields are named, of those that are unfit."""
SHOWN = 300
"""Characters of what is wrong with a field."""


def _storable(text: str) -> str:
    if "\0" in text or (not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)):
        raise ValueError("PostgreSQL takes no text with a zero character or half of a surrogate pair")
    if not text.strip():
        raise ValueError("there must be more than white space")
    return text


Name = Annotated[str, Field(min_length=1, max_length=2704), AfterValidator(_storable)]
"""A name by which PostgreSQL finds something: an entry of an index has at most 2,704 bytes."""
Reason = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_storable)]
"""As long as the database keeps it."""
Number = Annotated[int, Field(ge=1, le=2**63 - 1)]
"""The number of a letter, a saga or a backfill, which is a bigint."""


class AsciiResponse(JSONResponse):
    """JSON whose text can have any character, also one that UTF-8 has no bytes for."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def unfit(_: Request, error: Exception) -> AsciiResponse:
    """Tell which fields are unfit and why, without repeating them: they may be long, or may not be text."""
    assert isinstance(error, RequestValidationError)
    detail = [
        {"type": each["type"], "loc": each["loc"], "msg": str(each["msg"])[:SHOWN]}
        for each in error.errors()[:FIELDS]
    ]
    return AsciiResponse({"detail": detail}, status_code=422)
