"""The package for Spark's executors: a zip of pure Python, without Airflow.

It also holds bytecode, because otherwise each of Spark's Python processes would compile the sources. Another version of
Python uses the sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import py_compile
import stat
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from airflow_pgchange.spark.installed_versions import ARROW_DRIVER, OLDEST_ARROW_DRIVER

EXECUTOR_PACKAGES = (
    "psycopg[binary]",
    "pyarrow",
    "adbc-driver-manager",
    f"{ARROW_DRIVER}>={OLDEST_ARROW_DRIVER}",
)
"""Packages with native code, which no zip can carry: each executor's Python environment must have them."""

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""The mode bits with which a file's group or everybody may change it."""

KEPT = 30 * 24 * 3600.0
"""Seconds after its last use until an archive is deleted."""

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("feeds", "lake", "results", "spark", "topology")
"""The subpackages that go into the zip, because applications and executors import them. The package's own modules go
into it, too."""


def cache() -> Path:
    """Return this user's cache of this package. Create it if needed, and close it to other users. Raises
    PermissionError if it belongs to another user, because that user could put code into it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "airflow_pgchange"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} cannot be used as a cache, because it is not a directory of this user: set XDG_CACHE_HOME to "
            f"another directory"
        )
    if stat.S_IMODE(status.st_mode) & OTHERS_WRITE:
        path.chmod(0o700)
    return path


def is_trusted(path: Path) -> bool:
    """Whether the path is a file that this user made and that nobody else may change."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return ours and not stat.S_IMODE(status.st_mode) & OTHERS_WRITE


def archive(directory: Path | None = None) -> Path:
    """Return the zip in ``directory`` (default: the cache). Write it again if a file of the package has changed, or if
    another user could have changed the zip.

    Zips of older versions are deleted when they were not used for ``KEPT`` seconds.
    """
    files = _files()
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    target = (directory or cache()) / f"airflow_pgchange-{digest.hexdigest()[:16]}.zip"
    if is_trusted(target):
        target.touch()
    else:
        _write(files, target)
        _forget_unused(target.parent)
    return target


def _forget_unused(directory: Path) -> None:
    for path in directory.glob("airflow_pgchange-*.zip"):
        with suppress(FileNotFoundError, PermissionError):
            if path.stat().st_mtime < time.time() - KEPT:
                path.unlink()


def _files() -> dict[str, bytes]:
    sources = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    return {str(Path(ROOT.name) / path.relative_to(ROOT)): path.read_bytes() for path in sorted(sources)}


def _write(files: dict[str, bytes], target: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as out:
            for name, content in files.items():
                out.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
                out.writestr(zipfile.ZipInfo(f"{name}c"), _bytecode(name, content), zipfile.ZIP_DEFLATED)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink()
        raise


def _bytecode(name: str, source: bytes) -> bytes:
    """Return bytecode that is not checked against its source. Zips store times too coarsely for the usual check."""
    with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        file = Path(folder) / Path(name).name
        file.write_bytes(source)
        made = py_compile.compile(
            str(file),
            cfile=f"{file}c",
            dfile=name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        return Path(str(made)).read_bytes()
