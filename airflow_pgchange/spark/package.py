"""The package as Spark's executors get it: a zip of pure Python, without Airflow."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

EXECUTOR_PACKAGES = ("psycopg[binary]", "pyarrow", "adbc-driver-manager", "adbc-driver-postgresql")
"""Packages with native code, which no zip can carry: each executor's Python environment must have them."""

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("feeds", "spark")


def cache() -> Path:
    """This user's cache of this package; made, readable by the user alone, if it is not there."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "airflow_pgchange"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def archive(directory: Path | None = None) -> Path:
    """The zip in ``directory`` (default: the cache), made again when a file of the package has changed."""
    files = _files()
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    target = (directory or cache()) / f"airflow_pgchange-{digest.hexdigest()[:16]}.zip"
    if not target.exists():
        _write(files, target)
    return target


def _files() -> dict[str, bytes]:
    sources = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {"airflow_pgchange/__init__.py": b""} | {
        str(Path(ROOT.name) / path.relative_to(ROOT)): path.read_bytes() for path in sources
    }


def _write(files: dict[str, bytes], target: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as out:
            for name, content in files.items():
                out.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink()
        raise
