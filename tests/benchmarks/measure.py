"""Medians of measurements that were made side by side in a run, and their texts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")
SECTIONS = [""]
"""The titles of the sections so far."""


def backend_cpu(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> float:
    """Return the CPU seconds that the connection's backend has used. The server must run on this machine."""
    return int(Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


def cpu_of(connection: psycopg.Connection, work: Callable[[], object]) -> float:
    before = backend_cpu(connection)
    work()
    return backend_cpu(connection) - before


@dataclass(frozen=True)
class Cost:
    """The CPU time of the server's backend, and the time that the client waited, including flushes to disk, both in
    seconds."""

    cpu: float
    waited: float


def cost_of(connection: psycopg.Connection, work: Callable[[], object]) -> Cost:
    cpu = 0.0

    def counted() -> None:
        nonlocal cpu
        cpu = cpu_of(connection, work)

    waited = wall(counted)
    return Cost(cpu, waited)


def wall(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def side_by_side(rounds: int, *contenders: Callable[[], T]) -> list[list[T]]:
    """Measure the contenders in turn, A B A B, so that a change in the machine's speed affects all of them alike."""
    figures: list[list[T]] = [[] for _ in contenders]
    for _ in range(rounds):
        for row, contender in zip(figures, contenders, strict=True):
            row.append(contender())
    return figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of the pairs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@dataclass
class Report:
    """Collects lines `name: figure unit (goal)`; ``met`` is False once a goal was missed."""

    met: bool = True
    benchmark: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def say(
        self, name: str, figure: float, unit: str, *, most: float | None = None, least: float | None = None
    ) -> None:
        goal, good = "", True
        if most is not None:
            goal, good = f"  goal: at most {most:g}", figure <= most
        if least is not None:
            goal, good = f"  goal: at least {least:g}", figure >= least
        self.met &= good
        self.figures[f"{self.benchmark}: {SECTIONS[-1]}: {name}"] = float(f"{figure:.3g}")
        print(f"{name:<64} {figure:>10.3f} {unit:<12}{goal}{'' if good else '  MISSED'}", flush=True)


@contextmanager
def section(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    SECTIONS.append(title)
    yield
