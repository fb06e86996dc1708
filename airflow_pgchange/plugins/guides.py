"""The guides, as text. The API serves them, so that the page links to no other site."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException
from fastapi.responses import PlainTextResponse

from airflow_pgchange.plugins.access import VIEW
from airflow_pgchange.provider_info import GUIDES

router = APIRouter()


@router.get("/guides/{name:path}", dependencies=[VIEW], include_in_schema=False)
def guide(name: str) -> PlainTextResponse:
    """Return a guide by its name."""
    if name not in GUIDES:
        raise HTTPException(404, "there is no such guide")
    text = (_folder() / f"{name}.md").read_text()
    return PlainTextResponse(text, headers={"X-Content-Type-Options": "nosniff"})


def _folder() -> Path:
    """Return the folder of the guides: in an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "guides"
    return inside if inside.is_dir() else package.parent / "docs"
