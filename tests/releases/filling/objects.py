"""The tables, roles, tubes and queues of a filled database."""

from __future__ import annotations

from airflow_pgchange.messages import Saga, Step, create_saga_queues

from .consumers import STATES, Connection

TOUR = Saga(
    "tour",
    (Step("room", "rooms", "cancel_rooms"), Step("there", "tickets", "cancel_tickets", after=("room",))),
)
ROLES = ("release_consumer", "release_writer", "release_admin")
"""Roles with rights on the feeds. The database has no other roles but its owner and those of its queues."""
GRANTS = """
select pubsub.grant_consumer('release_consumer'), tube.grant_consumer('release_consumer'),
       pgmb.grant_consumer('release_consumer'), topology.grant_consumer('release_consumer');
select pgmb.grant_writer('release_writer'), topology.grant_writer('release_writer'),
       tube.grant_owner('release_writer'), revision.grant_owner('release_writer');
select pubsub.grant_admin('release_admin'), pgmb.grant_admin('release_admin'), revision.grant_maintainer('release_admin');
"""
TABLES = """
create table done (consumer text, id text);
create table expected (source text, id text);
create table worker (feed jsonb, consumer text, source text, state text, handle text);
create table payment (id bigint primary key, cents integer);
create table visit (id uuid primary key default gen_random_uuid());
create table reading (sensor uuid, no bigint, primary key (sensor, no));
create table item (id bigint primary key, day date, wanted boolean not null default true);
create table stock (id bigint primary key, day date);
create table parcel (id uuid primary key default gen_random_uuid());
create table account (id bigint primary key, name text);
create index on stock (day, id);
insert into stock select n, date '2024-01-01' + n % 3 from generate_series(1, 12) as n;
"""

TRACKED = ("payment", "visit", "reading")
"""Tables of commits, whose keys are an integer, a uuid and two columns. Their branches are 1, 2 and 3."""
TUBES = (*STATES, "picky", "filled", "keyed")
QUEUES = ("plain", "keyed", "watched", "copies")


def create(connection: Connection, with_queues: bool) -> None:
    """Create the tables, the roles, and the objects that our schemas make for tables, tubes and queues."""
    connection.execute(TABLES)
    for role in ROLES:
        connection.execute(
            f"do $$ begin create role {role} login; exception when duplicate_object then null; end $$"
        )
    connection.execute(GRANTS)
    connection.execute("select revision.track(t) from unnest(%s::regclass[]) as t", [list(TRACKED)])
    for tube in TUBES:
        table = {"keyed": "parcel", "filled": "stock"}.get(tube, "item")
        connection.execute(
            "select tube.tube_ensure_exists(%s, null, %s, %s::text[]::regtype[])",
            [f"tube {tube}", "wanted" if tube == "picky" else None, "{uuid}" if tube == "keyed" else None],
        )
        connection.execute("select tube.tube_table_ensure_attached(%s, %s, 0)", [f"tube {tube}", table])
    connection.execute("select pgmb.push_table_mutations('account', true, true, true)")
    if with_queues:
        create_queues(connection)


def create_queues(connection: Connection) -> None:
    for queue in QUEUES:
        connection.execute("select mbus.create_queue(%s, 8, %s)", [queue, queue == "watched"])
    connection.execute(
        "select mbus.order_by('keyed', 'kind'); select mbus.create_trigger('watched', 'copies')"
    )
    connection.execute("select mbus.create_view('plain'); select mbus.create_run_function('plain')")
    for state in STATES:
        connection.execute("select mbus.create_consumer(%s, 'plain')", [state])
    connection.execute("select mbus.create_consumer('even', 'plain', '(t.data -> ''n'')::integer % 2 = 0')")
    connection.execute(
        "grant execute on function mbus.post_plain(hstore, hstore, hstore, timestamp, timestamp, text) to release_writer"
    )
    create_saga_queues(connection, TOUR)
