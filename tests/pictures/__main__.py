"""Take the pictures of the documentation anew: ``python -m tests.pictures``, or of some of them with their names."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from demo.postgres import Cluster, free_port, system_binaries
from tests import airflow_home
from tests import page as pages
from tests.airflow_metadata import take_migrated
from tests.browser import started
from tests.pictures import past, png, views, world
from tests.pictures.views import PICTURES
from tests.suite import room
from tests.web import served

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main(names: list[str]) -> int:
    wanted = [picture for picture in PICTURES if not names or picture.name in names]
    if unknown := set(names) - {picture.name for picture in wanted}:
        print(
            f"there is no picture {', '.join(sorted(unknown))}: there are {', '.join(p.name for p in PICTURES)}"
        )
        return 2
    room.take()
    airflow_home.prepare()
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster.create(system_binaries())
        running.callback(cluster.remove)
        databases = running.enter_context(world.made(cluster))
        url = running.enter_context(airflow(folder, databases))
        browser = running.enter_context(started(folder))
        contexts = running.enter_context(views.opened(browser))
        # From the first query on the server takes samples, so the prepared hour has no gap at its end.
        views.warm_up(contexts["light"], url)
        with psycopg.connect(databases["airline"], autocommit=True) as connection:
            past.write(connection)
        for picture in wanted:
            world.carry_on(databases["airline"])
            target = IMAGES / f"{picture.name}.png"
            target.write_bytes(png.smaller(browser, views.take(contexts[picture.theme], url, picture)))
            print(f"{target.name}: {target.stat().st_size:,} bytes", flush=True)
    return 0


@contextmanager
def airflow(folder: Path, databases: dict[str, str]) -> Iterator[str]:
    """The address of an API server with the DAGs of the project, these databases, and a database that is down."""
    port = free_port()
    pages.prepare(folder, f"http://127.0.0.1:{port}")
    os.environ["AIRFLOW__PGCHANGE__CONNECTIONS"] = "warehouse"
    os.environ["AIRFLOW_CONN_WAREHOUSE"] = "postgres://reader@127.0.0.1:1/warehouse"
    for name, conninfo in databases.items():
        os.environ[f"AIRFLOW_CONN_{name.upper()}"] = airflow_home.uri(conninfo)
    take_migrated()
    pages.parse_folder(airflow_home.DAGS)
    with served(pages.served(), port=port) as url:
        yield url


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
