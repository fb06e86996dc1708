"""A pooler between the tests and a server."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from demo.postgres import free_port


@contextmanager
def pooler(database: str) -> Iterator[str]:
    """Run pgbouncer in transaction mode in front of a database, and yield its connection string."""
    target = conninfo_to_dict(database)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pgchange-") as folder:
        users, settings = Path(folder, "users"), Path(folder, "settings")
        users.write_text('"postgres" ""\n')
        settings.write_text(
            f"[databases]\n* = host={target['host']} port={target['port']}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = trust\n"
            f"auth_file = {users}\npool_mode = transaction\nunix_socket_dir =\n"
            "ignore_startup_parameters = extra_float_digits\ndefault_pool_size = 5\n"
        )
        user = None
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody").pw_name
            subprocess.run(["chown", "-R", user, folder], check=True)
        program = "/usr/sbin/pgbouncer"
        process = subprocess.Popen([program, "-q", str(settings)], user=user, stderr=subprocess.DEVNULL)
        conninfo = make_conninfo(database, port=port)
        try:
            deadline = time.monotonic() + 10
            while True:
                try:
                    psycopg.connect(conninfo).close()
                    break
                except psycopg.OperationalError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield conninfo
        finally:
            process.terminate()
            process.wait()
