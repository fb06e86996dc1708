"""The rights to see and to keep dead letters, the answers to invalid input, and letters of another kind of feed."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import dead_letters, schema
from airflow_pgchange.errors import (
    InvalidArgument,
    LetterRefused,
    PermissionDenied,
    SchemaMissing,
    UnknownConsumer,
    UnknownLetter,
)
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.draining import drain
from tests.commits import FEED, commits
from tests.conftest import database
from tests.letters import Poison, give_up, plan
from tests.readme import blocks, statements
from tests.suite.clusters import TEMPLATE
from tests.tubes import claim, make, one, touched

pytestmark = pytest.mark.usefixtures("few_sessions")


def write_letters(connection):
    """Two letters: one of the commit queue, one of tube q."""
    connection.execute("create schema tubes; set search_path = tubes, public")
    make(connection, "q")
    give_up(connection, connection.info.dsn)
    connection.execute("select tube.touch('q', 0, '{1}', 'T')")
    claim(connection)
    one(connection, "select tube.skip_batch('q', 0, 'why')")


@pytest.fixture(scope="module")
def lettered(cluster):
    """The name of a database with those letters, for tests to copy.

    Creating the letters takes several times as long as a copy.
    """
    for made in database(cluster, TEMPLATE):
        with psycopg.connect(made, autocommit=True) as connection:
            write_letters(connection)
        yield conninfo_to_dict(made)["dbname"]


@pytest.fixture
def db(cluster, lettered):
    yield from database(cluster, lettered)


@pytest.fixture
def admin(connect):
    """A connection to a database with those letters, as its owner."""
    connection = connect()
    connection.execute("set search_path = tubes, public")
    return connection


@pytest.fixture(scope="module")
def unchanged(shared):
    """A connection to a database with the two letters, for calls that are refused and change neither letter."""
    write_letters(shared)
    return shared


@pytest.fixture
def session(admin, role, connect_to):
    def open_one(*grants, on_pods=()):
        who = role("person")
        for grant in grants:
            admin.execute(f"select {grant}(%s::regrole)", [who.name])
        admin.execute(f"grant usage on schema tubes to {who.name}")
        if on_pods:
            admin.execute(f"grant {', '.join(on_pods)} on tubes.q to {who.name}")
        return connect_to(who.conninfo)

    return open_one


def kinds(connection):
    return [letter.kind for letter in dead_letters.letters(connection)]


def test_a_role_without_a_grant_sees_nothing(session):
    with pytest.raises(PermissionDenied):
        dead_letters.letters(session())
    with pytest.raises(
        PermissionDenied, match=r"select pgchange\.grant_admin\(.*\n.* include it: .*pubsub\.grant_admin"
    ):
        dead_letters.letters(session("pubsub.grant_consumer"))


def test_a_keeper_of_consumers_sees_the_letters_of_the_commit_queue_and_no_other(session):
    assert kinds(session("pubsub.grant_admin")) == ["commit"]


@pytest.mark.parametrize("right", ["select", "insert", "insert (op, shard, ids)", "delete"])
def test_a_role_that_may_see_a_tube_sees_its_letters_and_no_others(session, right):
    assert kinds(session("tube.grant_consumer")) == []
    assert kinds(session("tube.grant_consumer", on_pods=[right])) == ["tube"]


def test_a_role_with_both_grants_sees_the_letters_of_both(session):
    assert kinds(session("tube.grant_consumer", "pubsub.grant_admin", on_pods=["select"])) == [
        "commit",
        "tube",
    ]


@pytest.mark.parametrize("does", [dead_letters.redrive, dead_letters.drop_letters])
def test_a_role_that_may_only_look_changes_nothing(session, admin, does):
    looking = session("tube.grant_consumer", on_pods=["select", "insert"])
    with pytest.raises(PermissionDenied, match="may see letter 2"):
        does(looking, ids=[2])
    assert does(looking, older_than=timedelta(0)) == []
    assert kinds(admin) == ["commit", "tube"]
    assert touched(admin) == []


def test_a_refusal_names_the_role_and_the_grant_with_which_it_may_drop_the_letter(session, admin):
    looking = session("tube.grant_consumer", on_pods=["select"])
    with pytest.raises(PermissionDenied) as refused:
        dead_letters.drop_letters(looking, ids=[2])
    who = looking.info.user
    grant = f"grant select, delete on tubes.q to {who}"
    assert f"role {who} may see letter 2" in str(refused.value)
    assert grant in str(refused.value)
    admin.execute(grant)
    dead_letters.drop_letters(looking, ids=[2])
    assert kinds(admin) == ["commit"]


def test_a_refusal_names_the_grant_function_of_a_schema_without_rights_of_its_own_on_letters(session):
    looking = session("tube.grant_consumer")
    told = one(looking, "select pgchange.keeper_grant('commit', '{}')")
    assert told == f"let the owner of schema pubsub run: select pubsub.grant_admin('{looking.info.user}')"


def test_a_role_that_may_only_look_erases_no_key_and_expires_no_letter(session, admin):
    looking = session("tube.grant_consumer", "pubsub.grant_admin", on_pods=["select", "insert"])
    with pytest.raises(PermissionDenied, match="nothing was erased: role .* may see letter 2"):
        dead_letters.erase_letters(looking, "1")
    assert dead_letters.erase_letters(looking, "parsed", consumer="commits:test/0") == [
        dead_letters.ErasedLetter(1, 0)
    ]
    said = [line for (line,) in looking.execute("select pgchange.expire_letters('0')")]
    assert said[0].startswith("letters: dropped 1 ")
    assert said[1].startswith("kept 1 older letters: ")
    assert kinds(admin) == ["tube"]


def test_a_keeper_of_a_tube_erases_from_its_letters_and_from_no_others(session, admin):
    keeping = session("tube.grant_consumer", on_pods=["select", "delete"])
    assert dead_letters.erase_letters(keeping, "1") == [dead_letters.ErasedLetter(2, 1)]
    assert kinds(admin) == ["commit"]


@pytest.mark.parametrize("does", [dead_letters.redrive, dead_letters.drop_letters])
def test_a_letter_that_is_not_ones_own_is_unknown(session, admin, does):
    with pytest.raises(UnknownLetter):
        does(session("tube.grant_consumer", on_pods=["delete"]), ids=[1])
    with pytest.raises(UnknownLetter):
        does(session("pubsub.grant_admin"), ids=[2])
    assert kinds(admin) == ["commit", "tube"]


def test_a_worker_that_may_touch_sends_its_tubes_letters_again(session, admin):
    assert dead_letters.redrive(
        session("tube.grant_consumer", on_pods=["select", "insert", "delete"]), ids=[2]
    ) == [2]
    assert touched(admin) == [1]


def test_a_worker_that_may_not_touch_cannot_send_again(session, admin):
    with pytest.raises(PermissionDenied):
        dead_letters.redrive(session("tube.grant_consumer", on_pods=["select", "delete"]), ids=[2])
    assert kinds(admin) == ["commit", "tube"]


def test_a_keeper_of_consumers_sends_and_drops_letters_of_the_commit_queue(session, db):
    keeper = session("pubsub.grant_admin")
    assert dead_letters.redrive(keeper, ids=[1]) == [1]
    assert dead_letters.drop_letters(keeper, ids=[1]) == [1]


def test_nobody_writes_a_letter_in_anothers_name(session):
    worker = session("tube.grant_consumer", on_pods=["delete"])
    write = "insert into pgchange.letter (kind, consumer, address, content, changes, reason, attempts{}) values {}"
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level"):
        worker.execute(write.format("", "('commit', 'commits:x/0', '{}', '{}', 1, 'why', 1)"))
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level"):
        worker.execute(write.format("", """('tube', 'x', '{"tube": "r"}', '{}', 1, 'why', 1)"""))
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
        worker.execute(
            write.format(", given_up_by", "('tube', 'x', '{\"tube\": \"q\"}', '{}', 1, 'why', 1, 'x')")
        )


def failing(transaction, batch):
    raise Poison("cannot parse it")


def test_a_worker_with_the_rights_of_a_worker_gives_batches_up(admin, role):
    worker = role("worker")
    admin.execute("select tube.grant_consumer(%s::regrole)", [worker.name])
    admin.execute(
        f"grant usage on schema tubes to {worker.name}; grant select, delete on tubes.q to {worker.name}"
    )
    admin.execute("select tube.touch('q', 0, '{5}', 'T')")
    drained = drain(plan(worker.conninfo, feed=TubeFeed("q")), failing)
    assert len(drained.letters) == 1
    letter = dead_letters.letters(admin)[-1]
    assert (letter.given_up_by, letter.error) == (worker.name, "tests.letters.Poison: cannot parse it")


def test_a_consumer_with_the_rights_of_a_consumer_gives_batches_up(admin, role):
    consumer = role("consumer")
    admin.execute("select pubsub.grant_consumer(%s::regrole)", [consumer.name])
    commits(admin)
    drain(plan(consumer.conninfo), failing)
    letter = dead_letters.letters(admin)[-1]
    assert (letter.given_up_by, letter.error) == (consumer.name, "tests.letters.Poison: cannot parse it")


@pytest.mark.parametrize("does", [dead_letters.redrive, dead_letters.drop_letters])
@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({}, "say which"),
        ({"ids": [1], "consumer": "commits:test/0"}, "say which"),
        ({"ids": [0]}, "not the number"),
        ({"ids": [2**70]}, "not the number"),
        ({"ids": [True]}, "not the number"),
        ({"consumer": ""}, "an empty name"),
        ({"older_than": "soon"}, "30 days"),
        ({"older_than": "-1 day"}, "older_than must be a length of time"),
        ({"older_than": timedelta(days=-1)}, "older_than must be a length of time"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(unchanged, does, chosen, says):
    with pytest.raises(InvalidArgument, match=says):
        does(unchanged, **chosen)
    assert kinds(unchanged) == ["commit", "tube"]
    assert not any(letter.on_its_way for letter in dead_letters.letters(unchanged))


@pytest.mark.parametrize(
    "call",
    [
        "pgchange.redrive()",
        "pgchange.drop_letters()",
        "pgchange.drop_letters(1, 'commits:test/0')",
        "pgchange.erase_letters('')",
        "pgchange.erase_letters('1', '')",
        "pgchange.erase_letters('1', of_consumer => '')",
        "pgchange.expire_letters('-1 day')",
        "pgchange.expire_letters(null)",
    ],
)
def test_nonsense_in_sql_is_refused(unchanged, call):
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        unchanged.execute(f"select {call}")
    assert kinds(unchanged) == ["commit", "tube"]


def test_the_examples_of_the_guide_leave_letters_of_other_keys(unchanged):
    (example,) = blocks("sql", "docs/how-to/dead-letters.md")
    for statement in statements(example):
        assert unchanged.execute(statement).fetchall() == []
    assert kinds(unchanged) == ["commit", "tube"]


@pytest.mark.parametrize("does", [dead_letters.redrive, dead_letters.drop_letters])
def test_of_several_letters_none_is_touched_where_one_is_not_there(unchanged, does):
    with pytest.raises(UnknownLetter, match="no dead letter 99"):
        does(unchanged, ids=[2, 99])
    assert kinds(unchanged) == ["commit", "tube"]
    assert not any(letter.on_its_way for letter in dead_letters.letters(unchanged))


def test_a_letter_on_its_way_is_not_sent_twice(admin):
    dead_letters.redrive(admin, ids=[1])
    with pytest.raises(LetterRefused, match="on its way already"):
        dead_letters.redrive(admin, ids=[1])


def test_a_letter_of_a_tube_that_is_gone_says_so(admin):
    admin.execute("delete from tube.tube")
    assert "no tube q" in dead_letters.letters(admin)[1].hindrance
    with pytest.raises(UnknownConsumer, match="no tube q"):
        dead_letters.redrive(admin, ids=[2])


def test_a_database_without_the_store_says_what_to_run(bare_db, connect_to):
    with pytest.raises(SchemaMissing, match="airflow-pgchange install"):
        dead_letters.letters(connect_to(bare_db))


def test_with_a_system_its_letters_go_and_others_stay(admin):
    admin.execute("drop schema tubes cascade")
    schema.uninstall(admin, ["tube"])
    assert kinds(admin) == ["commit"]


PLUGIN = """
create schema gadget;
create table gadget.sent (content jsonb);
create function gadget.letter_rights(address jsonb) returns text[] language sql as $$
    select case when has_table_privilege('gadget.sent', 'insert') then '{see,keep}'::text[] end
$$;
create function gadget.check_letter(address jsonb, content jsonb) returns void language plpgsql as $$
begin
    if content ->> 'event' is null then
        raise exception using errcode = 'PC012', message = 'its event is gone';
    end if;
end
$$;
create function gadget.redrive(letter bigint) returns void language sql as $$
    with gone as (delete from pgchange.letter where id = $1 returning content)
    insert into gadget.sent select content from gone
$$;
select pgchange.register('gadget', 'gadget');
select pgchange.write_letter('gadget', 'gadget:a', '{"of": "a"}', '{"event": 7, "handler": "h"}', 1, 'why');
select pgchange.write_letter('gadget', 'gadget:a', '{"of": "a"}', '{}', 1, 'why');
"""


def test_another_kind_of_feed_plugs_in_with_three_functions_and_a_row(connect):
    connection = connect()
    connection.execute(PLUGIN)
    sendable, gone = [letter for letter in dead_letters.letters(connection) if letter.kind == "gadget"]
    assert (sendable.hindrance, gone.hindrance) == (None, "its event is gone")
    assert dead_letters.redrive(connection, consumer="gadget:a") == [sendable.id]
    assert one(connection, "select content from gadget.sent") == {"event": 7, "handler": "h"}
    assert dead_letters.drop_letters(connection, ids=[gone.id]) == [gone.id]


def test_a_letter_of_another_kind_that_is_on_its_way_is_not_sent_by_a_choice_of_letters(connect):
    connection = connect()
    connection.execute(PLUGIN)
    connection.execute(
        "create or replace function gadget.redrive(letter bigint) returns void language sql as $$"
        "update pgchange.letter set on_its_way = true where id = $1 $$"
    )
    choice = "select array(select pgchange.redrive(of_consumer => 'gadget:a'))"
    assert len(one(connection, choice)) == 1
    assert one(connection, choice) == []


def test_the_letters_of_another_kind_are_its_own(connect, session):
    connect().execute(PLUGIN)
    assert kinds(session("pubsub.grant_admin")) == ["commit"]
    stranger = session("pgchange.grant_admin")
    assert kinds(stranger) == []
    connect().execute(
        f"grant usage on schema gadget to {stranger.info.user};"
        f"grant insert, select on gadget.sent to {stranger.info.user}"
    )
    assert kinds(stranger) == ["gadget", "gadget"]


def test_a_password_in_an_error_is_not_in_its_letter(db, connect):
    connection = connect()
    commits(connection)
    with_password = f"{db} password=hunter2secret"
    with (
        pytest.raises(ValueError, match="hunter2secret"),
        ConsumerTransaction(FEED, with_password) as consumer,
    ):
        consumer.claim(1)
        raise ValueError("cannot connect with hunter2secret to postgresql://joe:topsecret@host/x, token=abc")
    drain(plan(db), failing)
    error = dead_letters.letters(connection)[-1].error
    assert error == "ValueError: cannot connect with *** to postgresql://joe:***@host/x, token=***"


def test_a_schema_that_a_stranger_made_in_place_of_one_that_went_is_not_asked(admin, role, session):
    keeper, someone = session("pubsub.grant_admin", "tube.grant_consumer"), role("someone")
    admin.execute("drop schema tube cascade")
    admin.execute(f"create schema tube authorization {someone.name}; grant usage on schema tube to public")
    for function in (
        "letter_rights(jsonb) returns text[]",
        "check_letter(jsonb, jsonb) returns void",
        "redrive(bigint) returns void",
    ):
        admin.execute(
            f"create function tube.{function} language plpgsql as $$"
            " begin raise exception 'run as %', current_user; end $$"
        )
    told = []
    for asking in (keeper, admin):
        asking.add_notice_handler(lambda notice: told.append(notice.message_primary))
    assert kinds(keeper) == ["commit"]
    assert dead_letters.redrive(keeper, older_than=timedelta(0)) == [1]
    assert "cannot be sent again here" in dead_letters.letters(admin)[1].hindrance
    with pytest.raises(LetterRefused, match="letters of kind tube cannot be sent again here"):
        dead_letters.redrive(admin, ids=[2])
    assert dead_letters.drop_letters(admin, ids=[2]) == [2]
    assert told == []
