"""A foreign table becomes a child of a captured table. PostgreSQL would then refuse writes through the parent."""

from __future__ import annotations

import psycopg
import pytest

from tests.mutations import events, push
from tests.suite.clusters import install, new_cluster
from tests.tubes import attach, detach, make, one, touched

ELSEWHERE = (
    "create foreign data wrapper nothing; create server elsewhere foreign data wrapper nothing; "
    "create foreign table far (id bigint not null) server elsewhere"
)
JOIN = "alter table item attach partition far for values from (100) to (200)"


def track(connection):
    connection.execute("alter table item add unique (id)")
    connection.execute("select revision.track('item', '{id}'); alter table item drop constraint item_id_key")


def touch(connection):
    make(connection)
    attach(connection, group_by=["id"])


def unpush(connection):
    connection.execute("select pgmb.stop_table_mutations_push('item')")


CAPTURES = {
    "commits": (track, lambda connection: connection.execute("select revision.untrack('item')")),
    "tube": (touch, detach),
    "mutations": (push, unpush),
}


@pytest.fixture(params=CAPTURES)
def parted(connect, request):
    """A captured partitioned table, and the statement that ends its capture."""
    connection = connect()
    capture, end = CAPTURES[request.param]
    connection.execute("create table item (id bigint not null) partition by range (id)")
    connection.execute("create table low partition of item for values from (0) to (100)")
    capture(connection)
    connection.execute(ELSEWHERE)
    return connection, end


def test_a_captured_table_gets_no_foreign_partition(parted):
    connection, _ = parted
    with pytest.raises(psycopg.errors.WrongObjectType, match="foreign table"):
        connection.execute(JOIN)
    connection.execute("create table high partition of item for values from (100) to (200)")
    connection.execute("insert into item values (1), (101); delete from item")


def test_a_table_that_is_captured_no_more_gets_one(parted):
    connection, end = parted
    end(connection)
    connection.execute(JOIN)
    assert one(connection, "select count(*) from pg_trigger where tgname ~ '^pg(change|mb)_'") == 0


def test_a_partition_leaves_and_comes_back(parted):
    connection, _ = parted
    connection.execute("alter table item detach partition low")
    connection.execute("insert into low values (1); delete from low")
    connection.execute("alter table item attach partition low for values from (0) to (100)")
    connection.execute("insert into item values (2); delete from item")


GRANTS = {
    "commits": "select revision.grant_owner({who}::regrole)",
    "tube": "select tube.grant_consumer({who}::regrole); grant insert (op, shard, ids, payload, ts) on q to {name}",
    "mutations": "select pgmb.grant_owner({who}::regrole)",
}
MENDS = {"commits": "revision.recapture", "tube": "tube.recapture", "mutations": "pgmb.recapture"}
CAPTURED = {
    "commits": "select array_agg(commit_id order by commit_id) from revision.commit_queue",
    "tube": "select array_agg(distinct i order by i) from q cross join unnest(ids) as i",
    "mutations": "select array_agg((payload ->> 'id')::bigint order by id) from pgmb.events",
}


@pytest.mark.parametrize("kind", CAPTURES)
def test_a_new_owner_makes_partitions_and_takes_over_the_capture(connection, role, connect_to, kind):
    capture, end = CAPTURES[kind]
    former, now = role("former"), role("now")
    make(connection)
    for who in (former, now):
        connection.execute(GRANTS[kind].format(who=f"'{who.name}'", name=who.name))
        connection.execute(f"grant create on schema public to {who.name}")
    owner = connect_to(former.conninfo)
    owner.execute("create table item (id bigint not null primary key) partition by range (id)")
    owner.execute("create table low partition of item for values from (0) to (100)")
    {"commits": lambda: owner.execute("select revision.track('item')"), "tube": lambda: attach(owner)}.get(
        kind, lambda: capture(owner)
    )()
    for table in ("item", "low"):
        connection.execute(f"alter table {table} owner to {now.name}")
    owner = connect_to(now.conninfo)
    owner.execute("create table high partition of item for values from (100) to (200)")
    owner.execute("insert into item values (1)")
    told = owner.execute(f"select {MENDS[kind]}()").fetchall()
    assert told != []
    assert not [line for (line,) in told if "cannot" in line or "in no " in line]
    owner.execute("insert into high values (101); insert into item values (2), (102)")
    assert sorted(one(connection, CAPTURED[kind])) == [1, 2, 101, 102]
    assert owner.execute(f"select {MENDS[kind]}()").fetchall() == []
    end(owner)
    owner.execute("insert into item values (3)")
    assert 3 not in one(connection, CAPTURED[kind])


ENDS = {
    "revision.track": "revision.untrack",
    "pgmb.push_table_mutations": "pgmb.stop_table_mutations_push",
}


@pytest.mark.parametrize("begin", ENDS)
def test_a_captured_table_becomes_a_partition_of_another_one(connection, begin):
    for table in ("item", "part"):
        connection.execute(
            f"create table {table} (id bigint primary key) partition by range (id); select {begin}('{table}')"
        )
    connection.execute("alter table item attach partition part for values from (0) to (100)")
    connection.execute(f"alter table item detach partition part; select {ENDS[begin]}('part')")
    assert one(connection, "select count(*) from pg_trigger where tgrelid = 'part'::regclass") == 0


@pytest.fixture
def tree():
    """A captured table on a server with foreign tables, and a foreign child that has a row."""
    cluster = new_cluster("system")
    install(cluster)
    info = psycopg.conninfo.conninfo_to_dict(cluster.conninfo())
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(
            "create table item (id bigint primary key, note text); create table far (id bigint, note text); "
            "insert into far values (2, 'a'); create extension postgres_fdw; "
            "create server elsewhere foreign data wrapper postgres_fdw "
            f"options (host '{info['host']}', port '{info['port']}', dbname '{info['dbname']}'); "
            f"create user mapping for current_user server elsewhere options (user '{info['user']}', "
            "password_required 'false')"
        )
        make(connection)
        attach(connection)
        push(connection)
        connection.execute(
            "create foreign table leaf () inherits (item) server elsewhere options (table_name 'far')"
        )
        yield connection
    cluster.remove()


def test_a_table_that_got_a_foreign_child_is_captured_no_more_until_that_is_gone(tree):
    tree.execute("insert into item values (1, 'a')")
    lines = [line for (line,) in tree.execute("select tube.recapture() union all select pgmb.recapture()")]
    assert lines == [
        "public.item: its capture for tube q was taken off, because the foreign table public.leaf is a child of it",
        "public.item: the capture of its mutations was taken off, because the foreign table public.leaf is a child of it",
    ]
    tree.execute("update item set note = 'b'; delete from item where id = 2")
    told = [line for (line,) in tree.execute("select told from pgchange.health() where severity = 'error'")]
    assert sum("public.leaf" in line for line in told) >= 2
    tree.execute("alter foreign table leaf no inherit item; truncate q; truncate pgmb.events")
    tree.execute("select tube.recapture(); select pgmb.recapture()")
    tree.execute("update item set note = 'c'")
    assert touched(tree) == [1]
    assert [topic for topic, _, _ in events(tree)] == ["public.item.update"]
