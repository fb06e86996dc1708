"""The table of all consumers of all feeds, and the table of findings that need a person."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest

from airflow_pgchange.admin import consumers, manual_operations, schema
from airflow_pgchange.admin.health import Finding, findings
from airflow_pgchange.errors import InvalidArgument, PermissionDenied
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, EventFeed, TopologyFeed, TubeFeed
from airflow_pgchange.feeds.feed_kinds import kinds
from airflow_pgchange.feeds.queries import ask, records
from tests.commits import claim_and_fail, commits, drain
from tests.events import poll_all, publish, subscribe
from tests.schemas import possible
from tests.topology import make_catalogue
from tests.tubes import attach, make
from tests.waiting import until, waits

pytestmark = pytest.mark.usefixtures("few_sessions")

FEEDS = [CommitFeed("test", 0), EventFeed("g"), TopologyFeed("router"), TubeFeed("q")]


@pytest.fixture
def full(connect):
    """A database in which every kind of feed has a consumer with something to do."""
    connection = connect()
    connection.execute("select pubsub.register('test', 0); select topology.register('router')")
    commits(connection)
    subscribe(connection)
    publish(connection, "a")
    make_catalogue(connection)
    connection.execute("create table item (id bigint primary key)")
    make(connection)
    attach(connection)
    connection.execute("insert into item values (1)")
    return connection


def shown(connection, *arguments):
    return records(connection, "select * from pgchange.status(%s, %s)", arguments or [1000, None])


def test_every_consumer_is_a_row_that_its_feed_can_be_made_of(full):
    rows = shown(full)
    assert [kinds()[row["kind"]].of_status(row["feed"]) for row in rows] == FEEDS
    assert [row["consumer"] for row in rows] == [feed.name for feed in FEEDS]
    assert all(row["ready"] + row["waiting"] > 0 for row in rows)


def buffers(connection, query):
    """Return the buffers that a query reads, also inside functions, after it was planned once."""
    for _ in range(2):
        ((plan,),) = connection.execute(
            f"explain (analyze, buffers, timing off, format json) {query}"
        ).fetchall()
    return plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]


LOOKS = ("select * from pgchange.health()", "select * from pgchange.reasons()")


def test_the_cost_of_health_grows_with_neither_backlog_nor_history(full, db):
    """Takes seconds: each feed first gets a backlog that is larger than status counts."""
    more(full)
    before = [buffers(full, look) for look in LOOKS]
    drain(db, limit=2000)
    more(full)
    after = [buffers(full, look) for look in LOOKS]
    assert all(now < 1.2 * then for then, now in zip(before, after, strict=True)), (before, after)


def more(connection, n=1100):
    """Write this number of changes of each feed, and dispatch the events."""
    commits(connection, n)
    publish(connection, *["a"] * n)
    poll_all(connection)
    connection.execute(
        "insert into item select m + g from (select max(id) from item) as i(m), generate_series(1, %s) as g",
        [n],
    )
    connection.execute(
        "insert into topology.log (term, index, event, written_at) "
        "select x.term, x.index + g, x.event, x.written_at from generate_series(1, %s) as g, "
        "(select * from topology.log order by term desc, index desc limit 1) as x",
        [n],
    )


def test_why_consumers_are_behind_costs_nothing_for_those_that_are_not(full):
    none = 'jsonb_populate_record(s, \'{"ready": 0, "waiting": 0}\')'
    full.execute("create temp table known as select array(select s from pgchange.status() as s) as few")
    full.execute(
        "alter table known add many pgchange.consumer_status[];"
        f"update known set many = few || array(select {none} from unnest(few) as s, generate_series(1, 200))"
    )
    looks = [f"select r.* from known, pgchange.reasons({column}) as r" for column in ("few", "many")]
    few, many = (buffers(full, look) for look in looks)
    assert many < few + 50, (few, many)


def test_a_consumer_of_a_branch_that_is_not_here_counts_no_changes(full):
    """Its branch is in another database, or was deleted."""
    full.execute("update pubsub.watermark set branch_id = 4711")
    (row,) = shown(full, 1000, "commit")
    assert (row["consumer"], row["ready"], row["elsewhere"]) == ("commits:test/4711", None, "changes")


def test_status_of_a_single_kind_can_be_queried(full):
    assert [row["consumer"] for row in shown(full, 10, "event")] == ["events:g"]


def test_a_number_that_is_negative_is_refused(full):
    with pytest.raises(InvalidArgument, match="upto must not be negative"):
        shown(full, -1, None)


def test_a_feed_that_cannot_tell_hides_no_other(full):
    told = []
    full.add_notice_handler(lambda notice: told.append(notice.message_primary))
    full.execute("drop function pgmb.waiting(integer)")
    assert [row["kind"] for row in shown(full)] == ["commit", "topology", "tube"]
    (line,) = told
    assert line.startswith("consumers of kind event are left out: function pgmb.waiting")
    assert findings(full, told.append) == []
    assert told[-1] == line


def test_a_role_that_may_see_no_feed_gets_an_error(full, role, connect_to):
    viewer, told = role("viewer"), []
    full.execute("select pgchange.grant_viewer(%s::regrole)", [viewer.name])
    with pytest.raises(PermissionDenied, match="permission denied"):
        consumers.status(connect_to(viewer.conninfo), None, warn=told.append)
    assert told == []


def test_a_feed_that_this_package_does_not_know_is_shown_with_the_others(full, other_db, connect_to):
    full.execute("""
        create schema toy;
        select pgchange.register('toy', 'toy');
        create function toy.status(integer) returns setof pgchange.consumer_status language sql as $$
            select 'toy', 'toy:one', '{}'::jsonb, 1::bigint, 5::bigint, true, 0.5::double precision, 0::bigint, 0::bigint,
                   false, null::uuid, null::integer, null, null::timestamptz, now(), null, null, null::uuid, null,
                   null::timestamptz
        $$
    """)
    for source in (None, full, connect_to(other_db)):
        rows = consumers.status(full, source, warn=pytest.fail)
        assert [row["ready"] for row in rows if row["consumer"] == "toy:one"] == [5]


def test_a_schema_that_was_dropped_by_hand_is_told_of_no_more(full):
    full.execute("drop schema topology cascade")
    assert [row["kind"] for row in shown(full)] == ["commit", "event", "tube"]
    assert findings(full, pytest.fail) == []


def test_a_batch_that_fails_is_a_finding_until_it_is_given_up_by_the_call_that_it_names(full):
    for _ in range(3):
        claim_and_fail(full.info.dsn)
    (found,) = findings(full)
    assert (found.kind, found.severity, found.consumer) == ("commit", "error", "commits:test/0")
    assert "has failed 3 times: " in found.told
    assert found.call == "to give it up: airflow-pgchange skip commits:test/0 --reason '...'"
    manual_operations.skip_batch(full, full, FEEDS[0], "no use")
    (letter,) = findings(full)
    assert (letter.kind, letter.severity, letter.consumer) == ("letters", "warning", "commits:test/0")


def test_a_consumer_at_work_on_a_batch_that_failed_before_is_no_finding(full):
    for _ in range(3):
        claim_and_fail(full.info.dsn)
    with full.transaction():
        full.execute("select pubsub.lock_watermark('test', 0)")
        assert [row["at_work"] for row in shown(full, 10, "commit")] == [True]
        assert findings(full) == []


def looked_at_while(connect, table, change):
    """Return the result of ``pgchange.status()`` if a table changes after the call has begun and before it reads the
    table."""
    looker, other = connect(), connect()
    with ThreadPoolExecutor(1) as pool, other.transaction():
        other.execute(f"lock table {table} in access exclusive mode")
        look = pool.submit(shown, looker)
        until(connect(), waits(looker, relation=table))
        change(other)
    return {row["consumer"]: row for row in look.result(30)}


def test_a_consumer_that_is_dropped_during_a_look_takes_no_other_with_it(full, connect, db):
    for name in ("first", "second", "third"):
        drain(db, feed=CommitFeed(name, 0))
    rows = looked_at_while(
        connect, "pgchange.letter", lambda other: other.execute("select pubsub.drop_consumer('second', 0)")
    )
    assert {"commits:first/0", "commits:third/0", "commits:test/0"} <= rows.keys()


def test_a_consumer_that_claims_again_while_status_runs_is_at_work(full, connect, db):
    feed, failed = EventFeed("g"), ZeroDivisionError()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), ConsumerTransaction(feed, db) as transaction:
            transaction.claim(10)
            raise failed
    with ExitStack() as working:
        transaction = ConsumerTransaction(feed, db)
        rows = looked_at_while(
            connect, "pgmb.scheduled", lambda _: working.enter_context(transaction).claim(10)
        )
        transaction.ack()
    assert (rows[feed.name]["attempt"], rows[feed.name]["at_work"]) == (3, True)


def test_a_role_that_may_see_one_feed_sees_that_feed(full, role):
    someone = role("someone")
    full.execute(f"select topology.grant_consumer('{someone.name}')")
    told = []
    with psycopg.connect(someone.conninfo, autocommit=True) as connection:
        rows = consumers.status(connection, warn=told.append)
        assert [row["consumer"] for row in rows] == ["topology:router"]
        others = [system.schema for system in possible(full)]
        assert len(told) == len({"mbus", "pgmb", "pubsub", "tube"} & set(others))


@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.kind)
def test_a_consumer_may_ask_whether_it_is_at_work(full, role, feed):
    """A watcher asks this with the rights of a consumer: it does not wake a consumer that is at work."""
    someone, schemas = role("someone"), {"commit": "pubsub", "event": "pgmb"}
    full.execute(f"select {schemas.get(feed.kind, feed.kind)}.grant_consumer('{someone.name}')")
    with psycopg.connect(someone.conninfo, autocommit=True) as connection, connection.transaction():
        assert ask(connection, feed.locked()) is False
        full.execute("begin")
        assert ask(full, feed.lock())
        assert ask(connection, feed.locked()) is True
        full.execute("rollback")


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("commits:delays/0", "commits:delays/0"), ("a b", "'a b'"), ("joe's", "'joe'\"'\"'s'"), ("", "''")],
)
def test_a_name_in_a_command_is_quoted_for_the_shell(connect, name, quoted):
    assert connect().execute("select pgchange.shell_quoted(%s)", [name]).fetchone() == (quoted,)


def test_a_finding_is_a_line_with_whom_it_is_about_and_what_mends_it():
    found = Finding("tube", "error", "tube:q/0", "its pods are gone", "select 1")
    assert str(found) == "tube:q/0: its pods are gone; select 1"
    assert str(Finding("tube", "error", None, "its pods are gone", None)) == "its pods are gone"


def test_a_schema_that_a_stranger_made_in_place_of_one_that_went_is_not_asked(full, role):
    someone = role("someone")
    full.execute("drop schema topology cascade")
    full.execute(f"create schema topology authorization {someone.name}")
    full.execute("""
        create function topology.status(integer) returns setof pgchange.consumer_status language plpgsql as $$
        begin raise exception 'run as %', current_user; end $$;
        create function topology.health() returns setof pgchange.finding language plpgsql as $$
        begin raise exception 'run as %', current_user; end $$
    """)
    told = []
    full.add_notice_handler(lambda notice: told.append(notice.message_primary))
    assert [row["kind"] for row in shown(full)] == ["commit", "event", "tube"]
    findings(full, told.append)
    assert set(told) == {f"schema topology is left out: it belongs to {someone.name}, and pgchange does not"}


def test_of_a_system_that_was_taken_out_nothing_is_left_in_work(full):
    claim_and_fail(full.info.dsn)
    schema.uninstall(full, ["pubsub"])
    assert records(full, "select kind from pgchange.claim") == []
    assert "commit" not in [row["kind"] for row in shown(full)]


def test_what_a_role_may_see_of_health_is_told_where_it_may_see_no_consumers(full, role):
    full.execute("alter table item rename to thing; create table item (id bigint primary key)")
    full.execute("select revision.track('item'); alter table item disable trigger user")
    someone = role("someone")
    full.execute(
        f"select revision.grant_maintainer('{someone.name}'), pgchange.grant_viewer('{someone.name}')"
    )
    left_out = []
    with psycopg.connect(someone.conninfo, autocommit=True) as connection:
        (found,) = findings(connection, left_out.append)
    assert "the capture is disabled on" in found.told
    assert left_out


def test_what_else_is_wrong_is_told_where_no_consumer_can_tell_how_it_stands(full):
    full.execute("alter table item rename to thing; create table item (id bigint primary key)")
    full.execute("select revision.track('item'); alter table item disable trigger user")
    for each_schema in ("pubsub", "pgmb", "topology", "tube"):
        full.execute(f"alter function {each_schema}.status(integer) rename to gone")
    full.execute("delete from pgchange.registered where schema = 'mbus'")
    left_out = []
    assert any("the capture is disabled on" in found.told for found in findings(full, left_out.append))
    assert left_out[-1].startswith("the findings about consumers are left out: function ")


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
@pytest.mark.parametrize(
    "asked",
    [
        "tube.health(integer)",
        "pgchange.letters_health()",
        "pgchange.consumers_health(integer, standing pgchange.consumer_status[])",
    ],
)
def test_what_another_try_mends_is_told_to_who_asks_what_is_wrong(shared, asked, state):
    made = asked.replace("integer", "integer default 3").replace("[]", "[] default null")
    with pytest.raises(psycopg.Error) as raised, shared.transaction(force_rollback=True):
        shared.execute(f"drop function {asked}")
        shared.execute(
            f"create function {made} returns setof pgchange.finding"
            f" language plpgsql as $$ begin raise exception using errcode = '{state}'; end $$"
        )
        shared.execute("select pgchange.health()")
    assert raised.value.sqlstate == state


@pytest.mark.parametrize("state", ["40001", "55P03"])
def test_what_another_try_mends_is_told_to_who_asks_how_consumers_stand(shared, state):
    with pytest.raises(psycopg.Error) as raised, shared.transaction(force_rollback=True):
        shared.execute(
            "create or replace function pubsub.status(upto integer default 1000)"
            " returns setof pgchange.consumer_status"
            f" language plpgsql as $$ begin raise exception using errcode = '{state}'; end $$"
        )
        shared.execute("select pgchange.status()")
    assert raised.value.sqlstate == state
