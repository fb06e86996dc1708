"""Reports of several tables of a tube: they equal the result of their query for all ids, whatever wrote the tables."""

from __future__ import annotations

import random
import threading
from unittest.mock import Mock

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument, MergeRefused, PermissionDenied
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, TubeFeed
from airflow_pgchange.tubes import TableDownstream, recompute, work_off
from tests.tubes import attach, controls, make, one, touch, touched

pytestmark = pytest.mark.usefixtures("few_sessions")

FEED = TubeFeed("q")
TABLES = """
    create table orders (id bigint primary key, customer text not null);
    create table order_line (no bigint primary key, order_id bigint not null, cents bigint not null);
    create index on order_line (order_id)
"""
REPORT = (
    "create table total (order_id integer primary key, customer text, cents numeric, seen text default 'new')"
)
TOTAL = """
    select o.id as order_id, o.customer, coalesce(sum(l.cents), 0) as cents
    from orders as o left join order_line as l on l.order_id = o.id
    where o.id = any(%(ids)s) and o.customer not like '%%x' -- not those of x
    group by 1;
"""
WITHOUT_LINES = """
    select o.id as order_id from orders as o
    where o.id = any(%(ids)s) and not exists (select from order_line as l where l.order_id = o.id)
"""
SHOWN = "select order_id, customer, cents from total order by 1"


def make_orders(connection):
    """Create two orders with lines that are in the report, and the table of the report."""
    connection.execute(TABLES)
    connection.execute("insert into orders values (1, 'ann'), (2, 'bob')")
    connection.execute("insert into order_line values (11, 1, 5), (12, 1, 7), (21, 2, 9)")
    connection.execute(f"{REPORT}; insert into total values (1, 'ann', 12), (2, 'bob', 9)")
    make(connection)
    attach(connection, "orders")
    attach(connection, "order_line", group_by=["order_id"])


@pytest.fixture
def prepared_orders():
    return make_orders


@pytest.fixture
def orders(prepared_orders, connect):
    """A connection to a database with orders."""
    return connect()


def whole(connection):
    """Compute the whole report with one query, for comparison."""
    ids = [
        each for (each,) in connection.execute("select id from orders union select order_id from order_line")
    ]
    query = psycopg.ClientCursor(connection).mogrify(
        TOTAL, {"ids": [psycopg.types.numeric.Int8(i) for i in ids]}
    )
    return sorted(tuple(row) for row in connection.execute(query))


def compute(results, source=None, query=TOTAL, limit=1000):
    """Process one batch. Return whether there was any."""
    with ConsumerTransaction(FEED, results, source, busy_timeout=10) as consumer:
        if consumer.claim(limit) is None:
            return False
        recompute(consumer, query, "public.total", "order_id")
    return True


def collect(results, source=None):
    source = source or results
    return work_off(
        FEED, source, TableDownstream(results, source, FEED, "total", "order_id"), busy_timeout=10
    )


def settle(results, source=None, query=TOTAL):
    """Work until nothing is left."""
    while compute(results, source, query) or collect(results, source):
        pass


def shown(connection, query=SHOWN):
    return connection.execute(query).fetchall()


def test_a_report_follows_the_columns_of_its_query(db, orders):
    """A column that the query computes has no length limit, so the column of the report keeps its own."""
    orders.execute("alter table orders add code varchar(9); alter table total add code varchar(5)")
    orders.execute("alter table total alter cents type numeric(9,2), alter customer type varchar(7)")
    orders.execute("update orders set code = '123456' where id = 1")
    query = TOTAL.replace("o.customer,", "o.customer, o.code, count(l.no) as lines,").replace(
        "group by 1", "group by 1, o.customer || (select max(order_id) from total)"
    )
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(1000) is not None
        recompute(consumer, query, "public.total", "order_id", evolve=True)
    assert shown(orders, "select order_id, code, cents, lines from total order by 1") == [
        (1, "123456", 12, 2),
        (2, None, 9, None),
    ]
    kinds = "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = 'total'::regclass and attnum > 0"
    assert [kind for (kind,) in shown(orders, kinds)] == [
        "integer",
        "character varying(7)",
        "numeric(9,2)",
        "text",
        "character varying(9)",
        "bigint",
    ]


def test_writes_of_every_table_are_in_the_report(db, orders):
    """A column of the report that the query does not return keeps its values."""
    orders.execute("update total set seen = 'old'")
    orders.execute(
        "update orders set customer = 'eve' where id = 1; insert into order_line values (22, 2, 1)"
    )
    orders.execute("insert into orders values (3, 'zoe'), (4, 'max')")
    settle(db)
    assert shown(orders) == [(1, "eve", 12), (2, "bob", 10), (3, "zoe", 0)]
    orders.execute("update order_line set order_id = 3 where no = 11; delete from orders where id = 2")
    orders.execute("update orders set customer = 'tom' where id = 4")
    settle(db)
    assert shown(orders) == [(1, "eve", 7), (3, "zoe", 5), (4, "tom", 0)]
    assert shown(orders, "select order_id from total where seen = 'old'") == [(1,)]


@pytest.mark.parametrize(
    "table",
    ["orders", pytest.param("order_line", marks=pytest.mark.release("the other table is in every run"))],
)
def test_a_backfill_of_either_table_ends_and_mends_the_report(db, orders, table):
    orders.execute("set session_replication_role = replica")
    orders.execute(
        "delete from orders where id = 1; delete from order_line where order_id = 1; update order_line set cents = 4"
    )
    orders.execute("update total set cents = 77 where order_id = 2; insert into total values (9, 'ghost', 9)")
    orders.execute("reset session_replication_role")
    tubes.backfill(orders, "q", f"public.{table}")
    settle(db)
    assert shown(orders) == whole(orders) == [(2, "bob", 4)]
    assert controls(orders) == []
    tubes.backfill(orders, "q", f"public.{table}")


def test_backfills_of_all_tables_at_once_fill_an_empty_report(db, orders):
    orders.execute("truncate total")
    for table in ("orders", "order_line"):
        tubes.ask_backfill(orders, "q", f"public.{table}")
    settle(db)
    assert shown(orders) == whole(orders) != []


@pytest.mark.parametrize("table", ["orders", "order_line", "orders, order_line"])
def test_a_truncate_is_in_the_report(db, orders, table):
    orders.execute(f"truncate {table}; insert into orders values (3, 'zoe')")
    settle(db)
    assert shown(orders) == whole(orders)
    assert (len(shown(orders)), controls(orders)) == ({"order_line": 3}.get(table, 1), [])


def test_rows_that_appear_because_others_are_truncated_are_in_the_report(db, orders):
    orders.execute("truncate total; insert into orders values (3, 'zoe')")
    settle(db, query=WITHOUT_LINES)
    assert shown(orders, "select order_id from total") == [(3,)]
    orders.execute("truncate order_line")
    settle(db, query=WITHOUT_LINES)
    assert shown(orders, "select order_id from total order by 1") == [(1,), (2,), (3,)]


def test_report_rows_that_a_truncate_does_not_affect_are_not_computed_again(db, orders):
    orders.execute("truncate order_line; insert into order_line values (23, 2, 6)")
    assert compute(db)
    assert [one.touched for one in collect(db)] == [1]
    assert touched(orders) == [1]


WRITES = (
    "insert into orders values ({id}, '{name}') on conflict (id) do update set customer = excluded.customer",
    "insert into order_line values ({no}, {id}, {cents}) on conflict (no) do update set order_id = excluded.order_id",
    "update order_line set cents = {cents} where order_id = {id}",
    "delete from orders where id = {id}",
    "delete from order_line where no = {no}",
    "update order_line set order_id = {id} where no = {no}",
)


def write_at_random(conninfo, seed):
    """Run transactions of a few random writes. Some of the transactions are rolled back."""
    chance = random.Random(seed)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for _ in range(60):
            with connection.transaction(force_rollback=chance.random() < 0.1):
                for _ in range(chance.randint(1, 3)):
                    chosen = chance.choice(WRITES) if chance.random() < 0.97 else "truncate order_line"
                    made = {
                        "id": chance.randint(1, 12),
                        "no": chance.randint(1, 40),
                        "cents": chance.randint(1, 9),
                    }
                    try:
                        with connection.transaction():
                            connection.execute(chosen.format(name=chance.choice(["ann", "max"]), **made))
                    except psycopg.errors.DeadlockDetected:
                        pass


@pytest.mark.parametrize(
    "place",
    [
        "one database",
        pytest.param("two databases", marks=pytest.mark.release("in one database it is in every run")),
    ],
)
def test_a_report_equals_one_that_is_computed_anew_after_random_writes(db, orders, other_db, place):
    """Writers, backfills and a worker run at the same time. The worker claims a few ids at a time."""
    apart = place == "two databases"
    results = other_db if apart else db
    with psycopg.connect(results, autocommit=True) as there:
        if apart:
            there.execute(REPORT)
        seed = random.randrange(10**9)
        writers = [threading.Thread(target=write_at_random, args=(db, seed + n)) for n in range(3)]
        for thread in writers:
            thread.start()
        batches = 0
        while any(thread.is_alive() for thread in writers):
            batches += compute(results, db, limit=5)
            collect(results, db)
        tubes.backfill(orders, "q", "public.orders")
        settle(results, db)
        assert shown(there) == whole(orders), f"seed {seed}"
        assert (batches > 0, controls(orders)) == (True, [])


def test_the_comparison_notices_a_query_that_began_before_the_claim(db, orders, connect, monkeypatch):
    """Plant this fault: the query begins before the claim.

    As the docstring of ``recompute`` says, it must begin after the claim.
    """
    early = connect()
    early.execute("begin isolation level repeatable read")
    early.execute("select from orders limit 1")
    monkeypatch.setattr(ConsumerTransaction, "reader", early)
    monkeypatch.setattr(
        "airflow_pgchange.tubes.reports.read_only", lambda connection: connection.transaction()
    )
    orders.execute("update order_line set cents = 1 where no = 11")
    settle(db)
    assert shown(orders) != whole(orders)


def test_values_of_every_kind_come_from_another_database_as_they_are(db, orders, other_db):
    columns = {
        "note": ("text", r"""E'a\tb\\N "\'' || chr(10)"""),
        "at": ("timestamptz", "'2026-01-31 12:00:00.123456+03'::timestamptz"),
        "raw": ("bytea", r"'\x00ff5c'::bytea"),
        "tags": ("text[]", "array['a,b', null, '{}']"),
        "doc": ("jsonb", """'{"a": [1, null]}'::jsonb"""),
        "who": ("uuid", "'c0ffee00-0000-4000-8000-000000000000'::uuid"),
        "far": ("numeric", "1234567890123456789.000000001"),
        "near": ("double precision", "0.1::float8 + 0.2"),
        "none": ("date", "null::date"),
    }
    made = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
    computed = ", ".join(f"{value} as {name}" for name, (_, value) in columns.items())
    with psycopg.connect(other_db, autocommit=True) as there:
        there.execute(f"create table total (order_id bigint primary key, {made})")
        touch(orders, 1)
        compute(other_db, db, f"select id as order_id, {computed} from orders where id = any(%(ids)s)")
        assert shown(there, "table total") == shown(orders, f"select 1::bigint, {computed}")


def test_a_batch_that_fails_leaves_the_report_and_the_tube_as_they_were(db, orders):
    orders.execute("update order_line set cents = 1; alter table total add check (cents > 1)")
    before = shown(orders)
    with pytest.raises(MergeRefused, match="total_cents_check"):
        compute(db)
    assert (shown(orders), touched(orders)) == (before, [1, 1, 2])
    assert one(orders, "select count(*) from pg_tables where schemaname = 'pgchange_staging'") == 0
    orders.execute("alter table total drop constraint total_cents_check")
    settle(db)
    assert shown(orders) == [(1, "ann", 2), (2, "bob", 1)]


def test_a_role_that_works_the_tube_and_reads_its_tables_keeps_the_report(db, orders, role):
    who = role("reporter")
    orders.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    orders.execute(
        f"grant select, insert, delete on q to {who.name}; grant select on orders, order_line to {who.name}"
    )
    orders.execute(f"grant select, insert, update, delete on total to {who.name}")
    orders.execute("update order_line set cents = 1; truncate orders")
    settle(who.conninfo)
    assert shown(orders) == []
    orders.execute("alter table orders enable row level security; insert into orders values (3, 'zoe')")
    with pytest.raises(PermissionDenied, match="row security hides rows of public.orders"):
        compute(who.conninfo)


@pytest.fixture(scope="module")
def refusing(shared):
    make_orders(shared)
    touch(shared, 1)
    shared.execute("create table plane (id bigint primary key)")
    make(shared, "apart")
    attach(shared, "orders", "apart")
    attach(shared, "plane", "apart", 1)
    touch(shared, 1, tube="apart")
    return shared


AS_ID = "select id as order_id{} from orders where id = any(%(ids)s)"
REFUSED = {
    "no ids": ("select 1 as order_id", InvalidArgument, "must restrict its rows"),
    "a percent sign": (
        AS_ID.format("") + " and customer like 'a%'",
        InvalidArgument,
        "percent sign as %%",
    ),
    "another placeholder": (AS_ID.format(", %(day)s as seen"), InvalidArgument, "its only placeholder"),
    "no key": (
        "select id from orders where id = any(%(ids)s)",
        MergeRefused,
        '"order_id", which is not among its columns',
    ),
    "a key that is no integer": (
        "select 1.5 as order_id where 1 = any(%(ids)s)",
        MergeRefused,
        "integers in the column .* which is numeric",
    ),
    "a column of another name": (
        AS_ID.format(", 1 as total"),
        MergeRefused,
        'no column "total": it has "cents"',
    ),
    "a column twice": (AS_ID.format(", 1 as cents, 2 as cents"), MergeRefused, 'several columns "cents"'),
    "a column of another type": (
        AS_ID.format(", 0.5::float8 as cents"),
        MergeRefused,
        "comes as double precision",
    ),
    "two rows for an id": (
        "select order_id from order_line where order_id = any(%(ids)s)",
        MergeRefused,
        "2 rows order_id=1: group them",
    ),
    "an id that was not asked for": (
        "select id as order_id from orders where id <> all(%(ids)s)",
        MergeRefused,
        "a row order_id=2 for an id that is not in the batch",
    ),
    "a row without an id": (
        "select null::bigint as order_id where 1 = any(%(ids)s)",
        MergeRefused,
        'a row without "order_id"',
    ),
    "an error of its own": (
        AS_ID.format(", 1 / (id - id) as cents"),
        psycopg.errors.DivisionByZero,
        "division by zero",
    ),
    "nonsense": ("selec %(ids)s", psycopg.errors.SyntaxError, "syntax error"),
    "a write": (
        "delete from orders where id = any(%(ids)s) returning id as order_id",
        psycopg.errors.SyntaxError,
        "syntax error",
    ),
}


@pytest.mark.parametrize(("query", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_query_that_gives_no_report_is_refused_by_its_fault(shared_db, refusing, query, error, message):
    with pytest.raises(error, match=message):
        compute(shared_db, query=query)
    assert (len(shown(refusing)), touched(refusing)) == (2, [1])


def test_tables_under_several_shards_are_refused(shared_db, refusing):
    refused = pytest.raises(InvalidArgument, match="under shard 0, and public.plane under shard 1")
    with refused, ConsumerTransaction(TubeFeed("apart"), shared_db) as consumer:
        consumer.claim()
        recompute(consumer, TOTAL, "public.total", "order_id")


def test_a_feed_without_a_tube_is_refused():
    with pytest.raises(InvalidArgument, match="commits:a/0 is a commit feed: only a tube has ids"):
        recompute(Mock(feed=CommitFeed("a", 0)), TOTAL, "public.total", "order_id")
