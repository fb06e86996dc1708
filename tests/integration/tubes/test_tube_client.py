"""A database as a client of tubes uses it, from its first call to its last: by names without a schema, in plain SQL."""

from __future__ import annotations

import asyncio
import json
import re

import asyncpg
from psycopg.conninfo import conninfo_to_dict

CLIENT = "set search_path = tube"


def shards(connection):
    """Create two shards with a table each. The ids may be null, as in users' tables."""
    for schema in ("sh0001", "sh0002"):
        connection.execute(f"create schema {schema}")
        connection.execute(
            f"create table {schema}.users (id bigint, name text, created_at timestamptz default now())"
        )
        connection.execute(
            f"insert into {schema}.users (id, name) values (1, 'a'), (2, 'b'), (null, 'c'), (3, 'no')"
        )


def tubes_of(connection):
    rows = connection.execute("select tube, partitions, tbl::text, shard from tube_list()").fetchall()
    return sorted(rows, key=str)


def replay(connection, partitions, partition):
    """Do a worker's work until nothing is left: read, process, delete.

    Return (op, shard, ids, type of the control pod).
    """
    query = connection.execute(
        "select tube_pods_sql(%s, %s, %s)", ["search", partitions, partition]
    ).fetchone()[0]
    done = []
    while pods := connection.execute(f"{query} limit 2").fetchall():
        done += [
            (op, shard, sorted(ids), (payload or {}).get("type")) for _, op, shard, ids, payload, _ in pods
        ]
        deleted = connection.execute(
            "select tube_pods_delete(%s, %s, %s, %s)",
            ["search", partitions, partition, [pod[0] for pod in pods]],
        ).fetchone()
        assert deleted == (len(pods),)
    return done


def test_a_client_works_a_database_from_its_first_call_to_its_last(connect):
    connection = connect()
    connection.execute(CLIENT)
    told = []
    connection.add_notice_handler(lambda d: told.append(d.message_primary))
    shards(connection)

    connection.execute("select tube_ensure_exists('search', 2, 'name <> ''no''')")
    for table in ("sh0001.users", "sh0002.users"):
        connection.execute("select tube_table_ensure_attached('search', %s, group_by => '{id}')", [table])
        connection.execute("select tube_table_ensure_attached('search', %s, group_by => '{id}')", [table])
    assert tubes_of(connection) == [("search", 2, "sh0001.users", 1), ("search", 2, "sh0002.users", 2)]

    connection.execute("insert into sh0001.users (id, name) values (4, 'd'), (null, 'e'), (5, 'no')")
    connection.execute("update sh0001.users set name = 'no' where id = 4")
    connection.execute("delete from sh0001.users where id = 1")
    connection.execute("select sh0001.users_touch('{2}')")
    connection.execute("select search_touch(2, '{7}', 'T')")
    connection.execute("select tube_pods_insert('search', 'select 8, 1 union all select 9, 2', 2, 'T')")
    assert dict(re.findall(r"(\w+)=(\S+)", told[-1]))["insert_ids"] == "2"

    assert connection.execute("select tube_backfill_schedule('search', 'created_at', 1, 1)").fetchone() == (
        1,
    )
    step1 = connection.execute("select tube_backfill_step1()").fetchone()[0]
    connection.execute("select tube_backfill_step2()")
    connection.execute("select tube_backfill_step3(%s, 'search', 'sh0001.users', 'created_at', 1)", [step1])
    stats = connection.execute(
        "select partition, inc_count, backfill_count, control_count from tube_stats() order by partition"
    ).fetchall()
    assert stats == [
        (0, "2", "0", None),
        (1, "4", "1", "backfill_end:1 backfill_schedule:1 backfill_start:1"),
    ]

    assert replay(connection, 2, 0) == [("T", 2, [7], None), ("T", 2, [8, 9], None)]
    assert replay(connection, 2, 1) == [
        ("I", 1, [4], None),
        ("U", 1, [4], None),
        ("D", 1, [1], None),
        ("T", 1, [2], None),
        ("T", 1, [], "backfill_start"),
        ("B", 1, [], "backfill_schedule"),
        ("B", 1, [2], None),
        ("B", 1, [], "backfill_end"),
    ]

    connection.execute("select tube_table_ensure_detached('search', 'sh0002.users')")
    connection.execute("insert into sh0002.users (id, name) values (10, 'z')")
    assert replay(connection, 2, 0) == []
    connection.execute("select tube_ensure_absent('search'), tube_ensure_absent('search')")
    assert tubes_of(connection) == []
    connection.execute("insert into sh0001.users (id, name) values (11, 'z')")
    assert connection.execute(
        "select count(*) from pg_trigger where tgrelid = 'sh0001.users'::regclass"
    ).fetchone() == (0,)


def test_a_client_of_another_driver_reads_and_deletes_with_parameters(db, connect_to):
    shards(connect_to(db))
    where = conninfo_to_dict(db)

    async def work():
        connection = await asyncpg.connect(
            host=where["host"], port=where["port"], user=where["user"], database=where["dbname"]
        )
        try:
            await connection.execute(CLIENT)
            await connection.fetchval("select tube_ensure_exists($1, $2)", "search", 2)
            await connection.fetchval(
                "select tube_table_ensure_attached($1, 'sh0001.users', group_by => '{id}')", "search"
            )
            await connection.fetchval(
                "select search_touch($1, $2, 'T', $3)", 1, [1, 2], json.dumps({"why": "asked"})
            )
            query = await connection.fetchval("select tube_pods_sql($1, $2, $3)", "search", 2, 1)
            pods = await connection.fetch(f"{query} limit $1", 10)
            assert [(pod["op"], pod["shard"], pod["ids"], json.loads(pod["payload"])) for pod in pods] == [
                ("T", 1, [1, 2], {"why": "asked"})
            ]
            deleted = await connection.fetchval(
                "select tube_pods_delete($1, $2, $3, $4)", "search", 2, 1, [pod["seq"] for pod in pods]
            )
            assert deleted == 1
            assert await connection.fetch(f"{query} limit $1", 10) == []
        finally:
            await connection.close()

    asyncio.run(work())
