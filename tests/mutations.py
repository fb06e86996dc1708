"""Short functions to publish the mutations of tables as events, and to read these events, for the tests."""

from __future__ import annotations

from psycopg import sql


def push(connection, table="item", **options):
    given = sql.SQL("").join(sql.SQL(", {} => {}").format(sql.Identifier(k), v) for k, v in options.items())
    query = sql.SQL("select pgmb.push_table_mutations({}::regclass{})")
    connection.execute(query.format(sql.Literal(table), given))


def push_items(connection):
    """Create a table whose mutations are all published as events. Return the connection."""
    connection.execute("create table item (id bigint primary key, kind text, amount int)")
    push(connection)
    return connection


def stop(connection, table="item"):
    connection.execute("select pgmb.stop_table_mutations_push(%s)", [table])


def events(connection):
    """Delete all events. Return the topic, payload and metadata of each, in the order of the ids."""
    rows = connection.execute("delete from pgmb.events returning id, topic, payload, metadata").fetchall()
    return [row[1:] for row in sorted(rows)]


def faults(connection):
    return connection.execute("select op, message, before, after from pgmb.push_fault order by id").fetchall()


def serialise(connection, body):
    """Replace the function that decides how an event describes a row."""
    connection.execute(
        "create or replace function pgmb.serialise_record_for_event("
        "tabl oid, op text, record record, out serialised jsonb, out emit boolean) "
        f"language plpgsql stable as $$ begin {body} end $$"
    )
