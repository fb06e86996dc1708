"""Types of request fields: text and numbers that PostgreSQL can store, with limits on their length."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field

FIELDS = 20
"""Maximum number of invalid fields that a response names."""
SHOWN = 300
"""Maximum number of characters in a message about a field."""


def _storable(text: str) -> str:
    if "\0" in text or (not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)):
        raise ValueError(
            "the text contains a NUL character or half of a surrogate pair, which PostgreSQL cannot store"
        )
    if not text.strip():
        raise ValueError("the text contains only white space")
    return text


Name = Annotated[str, Field(min_length=1, max_length=2704), AfterValidator(_storable)]
"""A name that PostgreSQL looks up in an index. An index entry has at most 2,704 bytes."""
Reason = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_storable)]
"""A reason. The database stores at most 4,000 characters."""
Number = Annotated[int, Field(ge=1, le=2**63 - 1)]
"""The number of a letter, a saga or a backfill, which is a bigint."""


class AsciiResponse(JSONResponse):
    """JSON in ASCII, so that its text can have any character, even a lone surrogate, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def unfit(_: Request, error: Exception) -> AsciiResponse:
    """Return a 422 response that names the invalid fields and the reasons. It does not repeat the values, which may be
    long or unencodable."""
    assert isinstance(error, RequestValidationError)
    detail = [
        {"type": each["type"], "loc": each["loc"], "msg": str(each["msg"])[:SHOWN]}
        for each in error.errors()[:FIELDS]
    ]
    return AsciiResponse({"detail": detail}, status_code=422)
