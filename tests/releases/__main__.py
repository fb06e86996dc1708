"""Keep releases, and write upgrade files.

``python -m tests.releases keep``: keep the present state as a release, in a folder of ``tests/releases``.

``python -m tests.releases write SYSTEM``: write the end of the newest upgrade file of a system. It has the functions that
have changed since the newest kept release.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.suite import room

room.take()

from airflow_pgchange.admin.versions import SYSTEMS  # noqa: E402
from tests.releases import kept, routines  # noqa: E402
from tests.suite import clusters  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.releases")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("keep", help="keep the present state as a release")
    writing = commands.add_parser("write", help="write the changed functions into an upgrade file")
    writing.add_argument("system", choices=[system.folder for system in SYSTEMS])
    given = parser.parse_args()
    for path in kept.keep() if given.command == "keep" else write(given.system):
        print(f"{path.relative_to(kept.ROOT)}: {path.stat().st_size:,} bytes")


def write(system: str) -> Sequence[Path]:
    if not kept.names():
        raise SystemExit("no release is kept, so no upgrade file is due")
    cluster = clusters.new_cluster("system")
    try:
        release = kept.unpacked(kept.names()[-1], room.take() / "package")
        return [routines.write(release, system, cluster)]
    finally:
        cluster.remove()


if __name__ == "__main__":
    main()
