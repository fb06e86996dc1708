"""Event logs that were dumped, restored, upgraded or removed."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import schema
from airflow_pgchange.errors import Refused
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests import dumps
from tests.conftest import database
from tests.events import drain, poll, poll_all, publish, publish_at, read, subscribe
from tests.mutations import events, push, push_items, serialise, stop
from tests.tubes import one


def use_up(connection, transactions):
    for _ in range(transactions):
        connection.execute("select pg_current_xact_id()")


def test_a_restored_log_goes_on_where_it_was_and_loses_nothing(connect, restored, own_cluster):
    connection = connect()
    subscribe(connection)
    publish(connection, "read")
    drain(connection)
    unread = publish(connection, "unread")
    poll_all(connection)
    late = publish(connection, "undispatched", "too")
    use_up(connection, 300)
    there = restored()
    fresh = publish(there, "published there")
    found = drain(there)
    assert poll(there) == 0
    found += drain(there)
    assert found == unread + late + fresh
    assert "given a new transaction id" in one(there, "select restored from pgmb.dispatching()")
    there.execute("update pgmb.dispatcher set restored_at = now() - interval '1 day'")
    assert one(there, "select restored from pgmb.dispatching()") is None


def test_a_restored_log_delivers_what_was_scheduled(connect, restored):
    connection = connect()
    subscribe(connection)
    event = publish_at(connection, "clock_timestamp() + interval '1 second'")
    use_up(connection, 300)
    there = restored()
    poll(there)
    there.execute("select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [event])
    assert drain(there) == [event]


def wait_long(connection):
    """Pretend that the published events are half an hour old."""
    connection.execute(
        "update pgmb.published set slot = ((extract(epoch from statement_timestamp())::bigint / 900) + 2) % 4"
    )


def test_undispatched_events_of_a_restored_log_are_kept_however_old_they_are(connect):
    connection = connect()
    subscribe(connection)
    publish(connection, "undispatched")
    wait_long(connection)
    # Pretend that the log comes from another cluster, whose transaction ids were much higher.
    connection.execute(
        "update pgmb.origin set written_in = '3'; update pgmb.dispatcher set snapshot = '9999999:9999999:'"
    )
    assert "restored" in one(connection, "select string_agg(line, ' ') from pgmb.trim_published() as t(line)")
    assert one(connection, "select count(*) from pgmb.published") == 1


def test_a_point_is_not_passed_by_what_another_cluster_dispatched(connect):
    connection, other = connect(), connect(autocommit=False)
    subscribe(connection)
    publish(connection, "a")
    connection.execute(
        "update pgmb.origin set written_in = '3'; update pgmb.dispatcher set snapshot = '9999999:9999999:'"
    )
    goal = one(connection, "select pgmb.point()")
    other.execute("select pg_advisory_xact_lock(pgmb.dispatch_key())")
    asked = "select pgmb.passed('g', pgmb.position('g'), %s)"
    assert one(connection, asked, Jsonb(goal))["passed"] is False


def test_slices_are_emptied_when_they_are_old_and_dispatched_and_not_before(connect):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, "a")
    wait_long(connection)
    trim = "select string_agg(line, ' ') from pgmb.trim_published() as t(line)"
    assert "kept" in one(connection, trim)
    assert drain(connection) == ids
    assert "emptied" in one(connection, trim)
    assert one(connection, "select count(*) from pgmb.published") == 0


def test_trimming_that_could_not_look_twice_is_refused(connect):
    connection = connect(autocommit=False)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.DatabaseError, match="read committed") as refused:
        connection.execute("select pgmb.trim_published()")
    assert refused.value.sqlstate == "PC007"


def test_a_restored_group_works_on_under_its_feed(connect, restored, own_cluster, db):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, "a", "b")
    with ConsumerTransaction(EventFeed("g"), db) as consumer:
        consumer.claim(1)
        consumer.ack()
    restored()
    found = []
    for _ in range(3):
        with ConsumerTransaction(EventFeed("g"), own_cluster.conninfo()) as consumer:
            if consumer.claim(10):
                found += [change.id for change in consumer.changes()]
                consumer.ack()
    assert found == ids[1:]


@pytest.mark.parametrize("acked", [0, 1])
def test_a_group_that_claimed_before_a_restored_log_was_dispatched_goes_on(connect, db, acked):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, "a", "b", "c")
    poll_all(connection)
    found = []
    for n in range(3):
        if n == acked:
            connection.execute("update pgmb.origin set written_in = '3'")
        with ConsumerTransaction(EventFeed("g"), db) as consumer:
            consumer.claim(1)
            found += [change.id for change in consumer.changes()]
            if n == acked:
                poll(connection)
                assert one(connection, "select restored from pgmb.dispatching()") is not None
            consumer.ack()
    assert found == ids


@pytest.fixture(scope="module")
def restored_tables(shared_db, shared, cluster):
    """A restored database whose tables publish their mutations, as its name.

    Each table serialises its rows in its own way. Because the database was restored within one cluster, every table has
    got another oid.
    """
    connection = push_items(shared)
    connection.execute("create table part (id int, secret text) partition by range (id)")
    connection.execute("create table part_1 partition of part for values from (1) to (10)")
    push(connection, "part")
    serialise(
        connection,
        "serialised := to_jsonb(record); emit := true; "
        "if tabl = 'public.part'::regclass then serialised := serialised - 'secret'; end if; "
        "if tabl = 'public.item'::regclass and record.id = 7 then raise 'unlucky'; end if;",
    )
    dump = dumps.dump(cluster, shared_db)
    for made in database(cluster, "template1"):
        dumps.load(cluster, made, dump)
        yield conninfo_to_dict(made)["dbname"]


@pytest.fixture
def there(cluster, restored_tables, connect_to):
    """A connection to a copy of the restored database."""
    for copy in database(cluster, restored_tables):
        yield connect_to(copy)


def test_of_a_restored_table_is_sent_what_was_to_be_sent_of_it(there):
    there.execute("insert into part values (1, 'x')")
    there.execute("insert into part_1 values (2, 'x')")
    there.execute("update part_1 set secret = 'y' where id = 2")
    there.execute("insert into item values (7)")
    assert events(there) == [("public.part.insert", {"id": 1}, {}), ("public.part.insert", {"id": 2}, {})]
    assert one(there, "select tbl::text from pgmb.push_fault") == "item"


def test_of_a_restored_table_nothing_is_to_be_mended(there):
    query = "select tbl::text, untriggered::text, stale from pgmb.pushing() order by 1"
    assert there.execute(query).fetchall() == [("item", "{}", False), ("part", "{}", False)]
    assert there.execute("select pgmb.recapture()").fetchall() == []


def test_publishing_a_restored_table_can_be_changed_and_stopped(there):
    push(there, "item", insert=False)
    stop(there, "part")
    there.execute("insert into item values (1)")
    there.execute("insert into part values (1, 'x')")
    there.execute("insert into part_1 values (2, 'x')")
    there.execute("delete from item")
    assert [topic for topic, _, _ in events(there)] == ["public.item.delete"]


def test_uninstalling_takes_the_log_and_nothing_else(connect):
    connection = connect()
    connection.execute("create table public.item (id bigint primary key, word text)")
    connection.execute("select pgmb.push_table_mutations('public.item')")
    before = one(connection, "select count(*) from pg_class where relnamespace = 'tube'::regnamespace")
    assert schema.uninstall(connection, ["pgmb"]) == ["pgmb"]
    connection.execute("insert into public.item values (1, 'still')")
    assert one(connection, "select count(*) from pg_trigger where tgrelid = 'public.item'::regclass") == 0
    assert (
        one(connection, "select count(*) from pg_class where relnamespace = 'tube'::regnamespace") == before
    )
    assert one(connection, "select count(*) from pg_namespace where nspname = 'pgmb'") == 0
    schema.install(connection)


def test_uninstalling_refuses_to_take_what_others_built_on_it(connect):
    connection = connect()
    for theirs in (
        "create view public.mine as select topic from pgmb.events",
        "create table public.mine (id pgmb.event_id)",
        "create table public.mine (id text default pgmb.create_event_id_default())",
        "create function public.mine(id pgmb.event_id) returns text as 'select id::text' language sql",
        "create table public.mine (g varchar references pgmb.subscription_groups)",
    ):
        connection.execute(theirs)
        with pytest.raises(Refused, match="mine"):
            schema.uninstall(connection, ["pgmb"])
        assert one(connection, "select count(*) from pgmb.events") == 0, theirs
        connection.execute(f"drop {theirs.split()[1]} public.mine")


def test_uninstalling_refuses_to_take_an_extension_that_somebody_has_put_there(connect):
    connection = connect()
    name = one(
        connection,
        "select name from pg_available_extension_versions "
        "where relocatable and not installed and requires is null order by name limit 1",
    )
    connection.execute(f'create extension "{name}" schema pgmb')
    with pytest.raises(Refused, match=f"used by others: extension {name}"):
        schema.uninstall(connection, ["pgmb"])
    connection.execute(f'alter extension "{name}" set schema public')
    assert schema.uninstall(connection, ["pgmb"]) == ["pgmb"]
    assert one(connection, "select count(*) from pg_extension where extname = %s", name) == 1


def test_uninstalling_refuses_to_take_an_extension_of_which_somebody_has_moved_a_part_there(connect):
    connection = connect()
    connection.execute("create function public.mine() returns int as 'select 1' language sql")
    connection.execute("alter extension plpgsql add function public.mine()")
    connection.execute("alter function public.mine() set schema pgmb")
    with pytest.raises(Refused, match="used by others: extension plpgsql"):
        schema.uninstall(connection, ["pgmb"])
    connection.execute("alter function pgmb.mine() set schema public")
    assert schema.uninstall(connection, ["pgmb"]) == ["pgmb"]
    assert one(connection, "select public.mine()") == 1


def test_a_standby_that_is_promoted_loses_nothing_that_it_had(own_cluster, own_database, connect_to):
    connection = connect_to(own_database)
    subscribe(connection)
    read_before = publish(connection, "a")
    assert drain(connection) == read_before
    ids = publish(connection, "b", "c")
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        own_cluster.stop("immediate")
        standby.promote()
        there = connect_to(standby.conninfo())
        assert drain(there) == ids
        assert read(there) == []
    finally:
        standby.remove()
