"""The tables of a survey of public applications: which of them each capture accepts, and the fate of their changes."""

from __future__ import annotations

from collections import defaultdict

import pytest
from psycopg import sql

from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.feeds.keys import text
from tests.batches import drained
from tests.spark_session import batch_of
from tests.survey import TABLES, TYPES, tables
from tests.tubes import one

# Each capture is made in a subtransaction. Tables with keys of the same types share a branch and a tube.
CAPTURE = """
create table capture (place int, kind text, types text, shown text, branch bigint, reason text);
create function captured(place int, tbl regclass, key name[]) returns void language plpgsql as $$
declare
    columns name[] := coalesce(key, pgchange.primary_key(tbl));
    key_types text := pgchange.key_types(tbl, columns)::text;
    shown text := pgchange.key_text(tbl, columns, 'k');
    branch bigint := (select c.branch from capture as c where c.types = key_types and c.branch is not null limit 1);
    is_key boolean := pgchange.key_trouble(tbl, columns) is null;
    name text := case when is_key then 't' || abs(hashtext(key_types)) else 'others' end;
begin
    begin
        branch := revision.track(tbl, key, branch_id => branch::text);
        insert into capture values (place, 'commits', key_types, shown, branch);
    exception when others then
        insert into capture values (place, 'commits', key_types, shown, null, sqlerrm);
    end;
    begin
        perform tube.tube_ensure_exists(name, 1, key => case when is_key then key_types else '{bigint}' end::regtype[]);
        perform tube.tube_table_ensure_attached(name, tbl, place, key);
        insert into capture values (place, 'tubes', key_types, shown);
    exception when others then
        insert into capture values (place, 'tubes', key_types, shown, null, sqlerrm);
    end;
    perform pgmb.push_table_mutations(tbl);
    insert into capture values (place, 'events', key_types);
end
$$;
"""
GOAL = 0.95
THEN = sql.SQL("; ")


@pytest.mark.parametrize(
    "count",
    [0, pytest.param(TABLES, marks=pytest.mark.release("Spark mirrors two hundred tables one by one"))],
)
def test_nearly_all_tables_of_the_survey_are_captured_read_and_mirrored(db, connection, count, capsys):
    """Create, attach three times, write and read tables: one of each shape, in a release two hundred.

    In a release Spark mirrors all of them, otherwise those with three lists of key types.
    """
    found = captured(connection, count)
    with capsys.disabled():
        taken = shares(connection, found)
    run(connection, [each for table in found for each in table.written()])
    commits, touched = keys(connection, taken, [1, 2]), keys(connection, taken, [1, 2, 3])
    for types, (branch, _) in feeds(connection).items():
        assert (
            sorted(text(change.id) for change in drained(CommitFeed("survey", branch), db)) == commits[types]
        )
    for types, (_, tube) in feeds(connection).items():
        pods = f"select distinct i::text from {tube}, unnest(ids) as i"
        assert sorted(each for (each,) in connection.execute(pods).fetchall()) == sorted(set(touched[types]))
    counted = "select split_part(topic, '.', -1), count(*) from pgmb.events group by 1"
    assert dict(connection.execute(counted).fetchall()) == {
        "insert": 2 * len(found), "update": len(found), "delete": len(found),
    }  # fmt: skip

    run(connection, [table.stale() for table in taken])
    mirrored = set()
    for _, tube in sorted(feeds(connection).values())[: None if count else 3]:
        with batch_of(TubeFeed(tube), db) as job:
            for attached in job.attached():
                job.mirror(attached, into="copies.{table}")
                mirrored.add(attached.name)
    assert len(mirrored) == len(taken) if count else len(mirrored) > 3
    same = {table.name for table in taken if one(connection, table.differences()) == 0}
    assert same == mirrored

    names = sql.SQL(", ").join(table.identifier for table in taken)
    connection.execute(sql.SQL("truncate {}").format(names))
    for types, (_, tube) in feeds(connection).items():
        of_types = one(connection, "select count(*) from capture where kind = 'tubes' and types = %s", types)
        assert one(connection, f"select count(*) from {tube} where ids = '{{}}'") == of_types


def captured(connection, count):
    """Create the tables and attach each to the three captures."""
    connection.execute("set timezone = 'UTC'")
    found = tables(count)
    made = THEN.join(table.created() for table in found)
    connection.execute(
        sql.SQL("create schema copies; {} {}; {}").format(sql.SQL(TYPES), made, sql.SQL(CAPTURE))
    )
    run(
        connection,
        [
            sql.SQL("select captured({}, {}::regclass, {}::name[])").format(
                table.number, table.identifier.as_string(None), table.key if table.shape.named else None
            )
            for table in found
        ],
    )
    return found


def run(connection, statements):
    """Run statements in one round trip."""
    connection.execute(THEN.join(statements))


def shares(connection, found):
    """Print and check the weighted share of the tables that each capture accepted. Return the tables that all
    accepted."""
    weights, total = {table.number: table.weight for table in found}, sum(table.weight for table in found)
    refused = defaultdict(set)
    for kind in ("commits", "tubes", "events"):
        rows = connection.execute("select place, reason from capture where kind = %s", [kind]).fetchall()
        lost = {place: reason for place, reason in rows if reason is not None}
        share = 1 - sum(weights[place] for place in lost) / total
        print(f"\n{kind}: {share:.1%} of the tables of the survey; refused: {sorted(set(lost.values()))[:4]}")
        assert share >= GOAL
        refused[kind] = set(lost)
    wanted = {table.number for table in found if not table.shape.takes}
    assert (refused["commits"], refused["tubes"], refused["events"]) == (wanted, wanted, set())
    return [table for table in found if table.number not in wanted]


def feeds(connection):
    """The branch and the tube of each list of types."""
    query = "select distinct types, branch, 't' || abs(hashtext(types)) from capture where branch is not null"
    return {types: (branch, tube) for types, branch, tube in connection.execute(query).fetchall()}


def keys(connection, taken, steps):
    """Return the texts of the keys of the tables' rows after some steps, sorted, by the types of the keys."""
    shown = dict(
        connection.execute("select place, (types, shown) from capture where kind = 'tubes'").fetchall()
    )
    rows = [
        sql.SQL('select {}, ({})::text collate "C" from (select {}) as k({})').format(
            types, sql.SQL(key), table.values(step), sql.SQL(", ").join(map(sql.Identifier, table.key))
        )
        for table in taken
        for types, key in [shown[table.number]]
        for step in steps
    ]
    found = defaultdict(list)
    for types, key in connection.execute(sql.SQL(" union all ").join(rows)).fetchall():
        found[types].append(key)
    return {types: sorted(each) for types, each in found.items()}
