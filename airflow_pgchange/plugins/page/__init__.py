"""The files of the page: plain modules without a build. Their path has their version, so that browsers cache them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from airflow.configuration import conf

PREFIX = "/pgchange"
FOLDER = Path(__file__).parent
TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}


@cache
def files() -> dict[str, bytes]:
    """Return the content of each file by its name."""
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}


@cache
def version() -> str:
    """Return a digest of all files. It changes if a file changes."""
    digest = hashlib.sha256()
    for name, content in files().items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]


def url(name: str) -> str:
    """Return the path of a file on the server. Airflow 3.1 imports no module from a path without a leading slash."""
    base = urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")
    return f"{base}{PREFIX}/page/{version()}/{name}"
