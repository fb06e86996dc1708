"""An S3 server on this machine, in its own process, and buckets in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from pyarrow.fs import S3FileSystem

KEY, SECRET = "planted-key", "planted-secret"
_numbers = count()


@dataclass(frozen=True)
class Server:
    port: int

    @property
    def settings(self) -> Mapping[str, str]:
        """PyIceberg's settings for this server."""
        return {
            "s3.endpoint": f"http://127.0.0.1:{self.port}",
            "s3.access-key-id": KEY,
            "s3.secret-access-key": SECRET,
            "s3.region": "us-east-1",
        }

    @property
    def files(self) -> S3FileSystem:
        return S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            endpoint_override=f"http://127.0.0.1:{self.port}",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def bucket(self) -> str:
        """Create a bucket, and return its name."""
        name = f"bucket-{next(_numbers)}"
        self.files.create_dir(name)
        return name


def environment(settings: Mapping[str, str], catalog: str = "LAKE") -> dict[str, str]:
    """Return the environment variables that give PyIceberg these settings for a catalog."""
    return {
        f"PYICEBERG_CATALOG__{catalog}__{name.upper().replace('.', '__').replace('-', '_')}": value
        for name, value in settings.items()
    }


@contextmanager
def server() -> Iterator[Server]:
    """Run a server until the end of the block. It keeps its objects in memory."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.s3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(int(process.stdout.readline()))
        finally:
            # The server ends with its parent process, because it reads its standard input until the parent closes it.
            process.stdin.close()
            process.wait(10)


def _serve() -> None:
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    print(moto.get_host_and_port()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
