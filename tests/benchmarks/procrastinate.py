"""procrastinate as a client of its own: jobs deferred in batches, and a worker that takes them one by one, as it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import psycopg
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

from tests.benchmarks.measure import wall

CONCURRENCY = 10
"""The worker's concurrency: a higher one made it no faster."""


def install(conninfo: str) -> None:
    with App(connector=SyncPsycopgConnector(conninfo=conninfo)).open() as app:
        app.schema_manager.apply_schema()


def together(conninfo: str, payload: str, batch: int, jobs: int) -> float:
    """Return the jobs a second of one publisher, with this number of jobs in a batch, and one worker at the same time."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("truncate procrastinate_jobs, procrastinate_workers cascade")
        connection.execute("checkpoint")
        writer = get_context("fork").Process(target=_publish, args=(conninfo, payload, batch, jobs))

        def both() -> None:
            writer.start()
            asyncio.run(_work(conninfo, jobs))
            writer.join()

        spent = wall(both)
        query = "select count(*) from procrastinate_jobs where status = 'succeeded'"
        done = connection.execute(query).fetchone()
    if done != (jobs,):
        raise SystemExit(f"procrastinate did {done} jobs, not {jobs}")
    return jobs / spent


def _task(app: App, work: Callable[..., Any]) -> Any:
    return app.task(name="take", queue="bench", pass_context=False)(work)


def _publish(conninfo: str, payload: str, batch: int, jobs: int) -> None:
    with App(connector=SyncPsycopgConnector(conninfo=conninfo)).open() as app:
        take = _task(app, lambda payload: None)
        for _ in range(jobs // batch):
            take.batch_defer(*[{"payload": payload}] * batch)


async def _work(conninfo: str, jobs: int) -> None:
    """Wait until all jobs are done."""
    left, done = jobs, asyncio.Event()
    app = App(connector=PsycopgConnector(conninfo=conninfo))

    async def take(payload: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    _task(app, take)
    async with app.open_async():
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)
        )
        await done.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
