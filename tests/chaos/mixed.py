"""All five feeds at once in a source: the ledgers of committed changes, and the check that each change was processed
exactly once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange import tubes
from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.topology import TopologyClient
from tests import queues, sagas
from tests.chaos import event_log, harness, mirror
from tests.chaos.harness import one
from tests.chaos.kills import PATIENCE, until
from tests.chaos.mirror_worker import TUBES, Backfill, attached_to
from tests.chaos.mixed_consumers import HANDLED, at_work
from tests.chaos.mixed_place import Notes, Place
from tests.chaos.mixed_worker import picture
from tests.chaos.mixed_writers import commit_prepared, finish_moves
from tests.events import subscribe
from tests.topology import make_catalogue

LEDGERS = """
create table touched (tube text, seq bigint, shard integer, ids bigint[]);
create table taken_off (tube text, seq bigint, shard integer, xid xid8 default pg_current_xact_id());
create table replayed (
    n bigint generated always as identity, tube text, shard integer, id bigint, xid xid8 default pg_current_xact_id());
create function note_pod() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into public.touched values (tg_table_name, new.seq, new.shard, new.ids);
        return new;
    end if;
    insert into public.taken_off values (tg_table_name, old.seq, old.shard);
    return old;
end
$$;
"""
NOTE_PODS = "create trigger noted after insert or delete on {} for each row execute function note_pod()"
QUEUES = """
create table posted (iid text primary key, kind text);
create table received (n bigint generated always as identity, consumer text, iid text);
create table started (saga bigint primary key);
"""
RESULTS = "create table heard (n bigint generated always as identity, id text)"
ALL = ("commits", "tubes", "events", "handlers", "topology", "messages", "sagas")
"""The feeds of the campaign. Messages and sagas need the extension hstore."""


def set_up(source: str, results: str, feeds: Sequence[str] = ALL) -> None:
    """Create everything that the campaign needs: in ``source``, and in ``results`` whatever can be in another
    database."""
    harness.prepare_results(results)
    event_log.set_up(source, results)
    mirror.set_up(source, source, 3)
    with psycopg.connect(source, autocommit=True) as connection:
        subscribe(connection, HANDLED, "e.topic <> 'c'")
        connection.execute(LEDGERS)
        for tube in TUBES:
            connection.execute(NOTE_PODS.format(tube))
        make_catalogue(connection)
        if "messages" in feeds:
            make_queue(connection)
            sagas.prepare(connection)
    with psycopg.connect(results, autocommit=True) as connection:
        connection.execute(RESULTS)


def make_queue(connection: psycopg.Connection[Any]) -> None:
    """The queue of orders, with a consumer of half of them, and the ledger."""
    connection.execute(QUEUES)
    queues.make(connection, "orders")
    queues.consumer(connection, "even", "(t.properties->'kind') = 'even'", "orders")


def end_what_writers_left(source: str) -> None:
    with psycopg.connect(source, autocommit=True) as connection:
        commit_prepared(connection, lambda process: True)
        finish_moves(connection)


def what_clients_know(place: Place, client: int, relay: str) -> Any:
    """Wait until a client has received the last change of the catalogue.

    Return the events that a new client receives.
    """
    last = one(
        place.source, "select array[term, index] from topology.log order by term desc, index desc limit 1"
    )
    known: list[Any] = []

    def heard() -> bool:
        [noted] = Notes.read(Path(place.folder), f"client {client}") or [[]]
        return bool(noted) and (noted[-1].get("event") or noted[-1]["snapshot"]) >= last

    def asked() -> bool:
        with suppress(ServerUnavailable), TopologyClient(relay) as fresh:
            known.append(picture(fresh.topology))
        return bool(known)

    until(heard, "the client to hear everything")
    until(asked, "the relay to answer")
    return known[0]


def drain(place: Place, feeds: Sequence[str] = ALL) -> None:
    """Process everything that is left. The consumers have ended."""
    end_what_writers_left(place.source)
    if place.fault == "":
        event_log.drain(place.source, place.results)
    _let_one_worker_do_all(place.source)
    for kind in feeds:
        with at_work(kind, replace(place, failures=0.0)) as consumer:
            if kind == "handlers":
                consumer.until = "empty"
            if kind == "tubes":
                _backfill(place, consumer)
            _work_off(kind, place, consumer)


def _work_off(kind: str, place: Place, consumer: Any) -> None:
    """Process batches in rounds until none is ready and none will become ready."""
    deadline, idle = time.monotonic() + PATIENCE, 0
    while idle < 2:
        found = consumer.round()
        waits = kind in WAITING and one(place.source, WAITING[kind])
        idle = 0 if found or waits else idle + 1
        assert time.monotonic() < deadline, f"{kind} are not at their end"


WAITING: Mapping[str, str] = {
    "tubes": "select " + " or ".join(f"exists (select from {tube})" for tube in TUBES),
    "handlers": "select exists (select from pgmb.unread_events)",
    "messages": "select sum(ready + delayed + waiting + in_work) > 0 from mbus.queues() where qname = 'orders'",
    "sagas": "select exists (select from mbus.saga where state in ('forward', 'rolling back'))",
}
"""By kind of feed: a query that tells whether there is work that is not ready yet."""


def _let_one_worker_do_all(source: str) -> None:
    with connect(source) as connection:
        for tube in TUBES:
            tubes.ensure(connection, tube, 1)


def _backfill(place: Place, worker: Any) -> None:
    """Finish backfills that were killed or stopped, and run those that have not begun."""
    for tube in TUBES:
        work = Backfill(place.source, tube, 1000)
        for table in attached_to(tube):
            with connect(place.source) as connection:
                while not work.backfill(connection, table):
                    worker.round()
