"""The page's own files, as the browser gets them: plain modules, under the version of them all, kept for good."""

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
    """Each file by its name."""
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}


@cache
def version() -> str:
    """Another one where a file is another."""
    digest = hashlib.sha256()
    for name, content in files().items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]


def url(name: str) -> str:
    """Return the path of a file on the server. Airflow 3.1 imports no module from a path without a leading slash."""
    base = urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")
    return f"{base}{PREFIX}/page/{version()}/{name}"
