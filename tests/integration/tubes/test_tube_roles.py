"""Rights follow the GRANTs on a tube's pods."""

from __future__ import annotations

import psycopg
import pytest

from tests.tubes import attach, claim, lag, make, one, take, touched

DENIED = psycopg.errors.InsufficientPrivilege


def make_admin(connection):
    connection.execute("create schema tubes")
    connection.execute("set search_path = tubes, public")
    make(connection, "q")
    make(connection, "r")
    connection.execute("create table public.item (id bigint primary key)")
    attach(connection, "public.item")


@pytest.fixture
def prepared_admin():
    return make_admin


@pytest.fixture
def admin(prepared_admin, connect):
    connection = connect()
    connection.execute("set search_path = tubes, public")
    return connection


@pytest.fixture
def session(admin, role, connect_to):
    """A session of a role that may use tubes, with some rights on the pods of q."""

    def open_one(*rights, keeper=False):
        who = role("user")
        admin.execute(f"select tube.grant_{'owner' if keeper else 'consumer'}(%s::regrole)", [who.name])
        admin.execute(f"grant usage on schema tubes to {who.name}")
        if rights:
            admin.execute(f"grant {', '.join(rights)} on tubes.q to {who.name}")
        connection = connect_to(who.conninfo)
        connection.execute("set search_path = tubes, public")
        return connection

    return open_one


def test_a_role_without_a_grant_may_do_nothing(role, connect_to, admin):
    connection = connect_to(role("nobody").conninfo)
    for call in [
        "select * from tube.tube_list()",
        "select tube.tube_ensure_exists('mine')",
        "select tube.touch('q', 0, '{1}', 'T')",
        "select * from tube.tube",
        "select tube.grant_consumer(current_user::text::regrole)",
    ]:
        with pytest.raises(DENIED):
            connection.execute(call)


def test_a_role_sees_the_tubes_whose_pods_it_was_granted_and_no_other(session):
    assert session().execute("select distinct tube from tube.tube_list()").fetchall() == []
    assert session("select").execute("select distinct tube from tube.tube_list()").fetchall() == [("q",)]
    for call in ["select tube.touch('r', 0, '{1}', 'T')", "select tube.tube_pods_sql('r', 1, 0)"]:
        with pytest.raises(psycopg.Error, match="no tube r"):
            session("insert").execute(call)


def test_insert_touches_and_does_not_work(session, admin):
    connection = session("insert")
    connection.execute("select tube.touch('q', 0, '{1}', 'T')")
    connection.execute("select tube.tube_pods_insert('q', 'select 2, 1', 0)")
    assert touched(admin) == [1, 2]
    with pytest.raises(DENIED):
        claim(connection)
    with pytest.raises(DENIED):
        connection.execute("select tube.tube_pods_delete('q', 1, 0, '{1}')")


def test_select_and_delete_work_and_do_not_touch(session, admin):
    admin.execute("select tube.touch('q', 0, '{1,2}', 'T')")
    connection = session("select", "delete")
    connection.execute("select tube.register('q', 1, 0)")
    assert lag(connection)["ready"] == 2
    assert take(connection) == [1, 2]
    with pytest.raises(DENIED):
        connection.execute("select tube.touch('q', 0, '{1}', 'T')")
    admin.execute("select tube.touch('q', 0, '{3}', 'T')")
    rows = connection.execute(one(connection, "select tube.tube_pods_sql('q', 1, 0)")).fetchall()
    assert one(connection, "select tube.tube_pods_delete('q', 1, 0, %s)", [row[0] for row in rows]) == 1
    assert connection.execute("select * from tube.control_pods('q', 1, 0)").fetchall() == []
    assert len(connection.execute("select * from tube.status()").fetchall()) == 1
    assert len(connection.execute("select * from tube.tube_stats()").fetchall()) == 1
    assert len(connection.execute("select * from tube.attachments()").fetchall()) == 1


def test_select_looks_and_does_not_work(session, admin):
    admin.execute("select tube.register('q', 1, 0)")
    connection = session("select")
    assert lag(connection)["ready"] == 0
    assert connection.execute("update tube.worker set done = 5").rowcount == 0
    with pytest.raises(DENIED):
        connection.execute("insert into tube.worker (tube, worker) values ('q', 7)")


@pytest.mark.parametrize("keeper", [False, True])
def test_a_role_cannot_change_what_is_anothers(session, admin, keeper):
    connection = session("select", "insert", "delete", keeper=keeper)
    for call in [
        "select tube.tube_ensure_exists('q', 5)",
        "select tube.tube_ensure_exists('q', predicate => 'false')",
        "select tube.tube_ensure_absent('q')",
        "select tube.tube_table_ensure_attached('q', 'public.item', 7)",
        "insert into tube.tube (name, pods) values ('x', 'public.item')",
        "insert into tube.attachment values ('q', 'public.item', 7, 'id', 1)",
        "insert into tube.attachment values ('r', 'public.item', 7, 'id', 1)",
    ]:
        with pytest.raises(psycopg.Error):
            connection.execute(call)
    connection.execute("delete from tube.attachment")
    assert admin.execute("select tube, partitions, shard from tube.tube_list('public.item')").fetchall() == [
        ("q", 1, 0)
    ]


DEEDS = {
    "select tube.tube_table_ensure_detached('q', 'public.item')": "public.item, postgres, may detach it",
    "select tube.tube_table_ensure_detached(null, null)": "public.item, postgres, may detach it",
    "select tube.tube_ensure_absent('q')": "tubes.q, postgres, may remove tube q",
    "select tube.tube_ensure_exists('q', 5)": "tubes.q, postgres, may change tube q",
    "select tube.tube_ensure_exists('q', predicate => 'false')": "tubes.q, postgres, may change tube q",
}


@pytest.mark.parametrize("keeper", [False, True])
def test_an_error_for_a_role_that_owns_neither_table_nor_tube_names_the_owner(session, keeper):
    connection = session("select", "insert", "delete", keeper=keeper)
    for call, deed in DEEDS.items():
        with pytest.raises(DENIED, match=f"only the owner of {deed}") as told:
            connection.execute(call)
            pytest.fail(f"{call} was done")
        assert told.value.diag.message_hint == "connect as postgres"


def test_an_owner_attaches_backfills_and_detaches_its_own_table(session, admin):
    connection = session("insert", "select")
    name = one(connection, "select current_user::text")
    admin.execute(f"create schema own0005 authorization {name}")
    connection.execute("create table own0005.mine (id bigint primary key)")
    connection.execute("insert into own0005.mine values (1), (2)")
    attach(connection, "own0005.mine", shard=None)
    connection.execute("select own0005.mine_touch('{9}')")
    number = one(connection, "select tube.backfill_begin('q', 'own0005.mine', 'id')")
    connection.execute("select tube.backfill_chunk(%s)", [number])
    assert one(connection, "select state from tube.backfills()") == "done"
    assert touched(admin) == [1, 2, 9]
    assert connection.execute("select tube.recapture()").fetchall() == []
    with pytest.raises(DENIED, match="only the owner"):
        attach(connection, "public.item", shard=1)
    connection.execute("select tube.tube_table_ensure_detached('q', 'own0005.mine')")
    assert admin.execute("select tbl::text from tube.tube_list()").fetchall() == [("item",), (None,)]


def test_an_owner_touches_attaches_anew_and_detaches_a_table_that_another_has_attached(session, admin):
    owner = session("insert")
    admin.execute(f"create schema own authorization {one(owner, 'select current_user::text')}")
    owner.execute("create table own.mine (id bigint primary key)")
    attach(admin, "own.mine")
    owner.execute("select own.mine_touch('{9}')")
    assert touched(admin) == [9]
    attach(owner, "own.mine")
    owner.execute("select tube.tube_table_ensure_detached('q', 'own.mine')")
    assert admin.execute("select tbl::text from tube.tube_list()").fetchall() == [("item",), (None,)]


def test_an_owner_who_may_not_see_the_tube_is_told_so_by_the_touch_of_its_table(session, admin):
    owner = session("insert")
    name = one(owner, "select current_user::text")
    admin.execute(f"create schema own authorization {name}")
    owner.execute("create table own.mine (id bigint primary key)")
    attach(owner, "own.mine")
    admin.execute(f"revoke all on tubes.q from {name}")
    with pytest.raises(psycopg.Error, match="own.mine is attached to no tube that you may use") as told:
        owner.execute("select own.mine_touch('{9}')")
    assert "INSERT granted" in told.value.diag.message_hint
    assert touched(admin) == []


@pytest.mark.parametrize("granted", ["select", "insert (op, shard, ids)"])
def test_an_owner_whose_pods_are_anothers_is_told_what_to_grant(session, admin, granted):
    connection = session(granted)
    name = one(connection, "select current_user::text")
    admin.execute(f"create schema own authorization {name}")
    connection.execute("create table own.mine (id bigint primary key)")
    with pytest.raises(DENIED, match="may not put pods") as told:
        attach(connection, "own.mine")
    assert f"grant insert (op, shard, ids, payload, ts) on tubes.q to {name}" in told.value.diag.message_hint


@pytest.mark.parametrize(
    ("taken", "write"), [("shard", "insert into own.mine values (1)"), ("payload", "truncate own.mine")]
)
def test_a_write_goes_on_where_a_right_on_one_column_of_the_pods_was_taken_away(session, admin, taken, write):
    connection = session("insert (op, shard, ids, payload, ts)")
    name = one(connection, "select current_user::text")
    admin.execute(f"create schema own authorization {name}")
    connection.execute("create table own.mine (id bigint primary key)")
    attach(connection, "own.mine")
    admin.execute(f"revoke insert ({taken}) on tubes.q from {name}")
    said = []
    connection.add_notice_handler(lambda notice: said.append(notice.message_primary))
    connection.execute(write)
    assert [line.endswith("not captured: tube q cannot be written") for line in said] == [True]


def test_a_role_that_inserts_pods_cannot_choose_their_seq_or_txid(session, admin):
    connection = session("insert (op, shard, ids, payload, ts)")
    assert connection.execute("select distinct tube from tube.tube_list()").fetchall() == [("q",)]
    for column, value in [("seq", "9000000000000000000"), ("txid", "999999999999")]:
        with pytest.raises(DENIED):
            connection.execute(f"insert into tubes.q (shard, ids, {column}) values (0, '{{1}}', '{value}')")
    connection.execute("select tube.touch('q', 0, '{2}', 'T', '{}')")
    connection.execute("select tube.tube_pods_insert('q', 'select 3', 0)")
    connection.execute("insert into tube.fault (tube, tbl, ids, message) values ('q', 'item', 1, 'told')")
    assert take(admin) == [2, 3]
    assert lag(admin)["ready"] == 0


def test_a_keeper_makes_changes_and_removes_tubes_of_its_own(session, admin):
    connection = session(keeper=True)
    name = one(connection, "select current_user::text")
    admin.execute(f"create schema own authorization {name}")
    connection.execute("set search_path = own")
    make(connection, "mine")
    make(connection, "mine", workers=3, predicate="id > 0")
    connection.execute("select mine_touch(4, '{1}', 'T')")
    batch = claim(connection, 1, 3, tube="mine")
    assert batch["count"] == 1
    connection.execute("select tube.skip_batch('mine', 1, 'cannot be done')")
    row = connection.execute("select reason, changes, given_up_by::text from pgchange.letter").fetchone()
    assert row == ("cannot be done", 1, name)
    connection.execute("select tube.tube_ensure_absent('mine')")
    assert admin.execute("select name from tube.tube order by 1").fetchall() == [("q",), ("r",)]


def test_anothers_function_that_looks_like_a_tubes_does_not_keep_its_keeper_from_removing_it(session, admin):
    keeper = session(keeper=True)
    admin.execute(f"create schema own authorization {one(keeper, 'select current_user::text')}")
    keeper.execute("set search_path = own")
    make(keeper, "mine")
    admin.execute("create function public.mine_touch() returns void language sql as 'select'")
    admin.execute("comment on function public.mine_touch() is 'Touch ids of a shard in tube mine.'")
    keeper.execute("select tube.tube_ensure_absent('mine')")
    names = "select pronamespace::regnamespace::text from pg_proc where proname = 'mine_touch'"
    assert admin.execute(names).fetchall() == [("public",)]


def test_a_keeper_cannot_make_a_tube_where_it_may_not_create_tables(session):
    connection = session(keeper=True)
    with pytest.raises(DENIED):
        make(connection, "mine")


@pytest.fixture
def handed_over(session, admin):
    """Return the former owner and the present owner of the table own.mine.

    It was attached to q before it changed hands.
    """
    former, owner = session("insert"), session("insert")
    names = [one(each, "select current_user::text") for each in (former, owner)]
    admin.execute("create schema own")
    admin.execute(f"grant all on schema own to {', '.join(names)}")
    former.execute("create table own.mine (id bigint primary key)")
    attach(former, "own.mine", shard=5)
    admin.execute(f"alter table own.mine owner to {names[1]}")
    return former, owner


def test_a_new_owner_attaches_a_table_anew_that_another_had_attached(handed_over, admin):
    _, owner = handed_over
    attach(owner, "own.mine", shard=None)
    owner.execute("insert into own.mine values (1)")
    assert touched(admin) == [1]
    assert owner.execute("select stale, untriggered from tube.attachments()").fetchone() == (False, [])
    theirs = (
        "select every(pg_get_userbyid(p.proowner) = current_user) from pg_trigger as t join pg_proc as p on "
    )
    assert one(owner, theirs + "p.oid = t.tgfoid where tgrelid = 'own.mine'::regclass")


def test_a_table_that_changed_hands_is_mended_by_its_new_owner(handed_over, admin):
    _, owner = handed_over
    assert one(owner, "select tube.recapture()") == "own.mine: its capture for tube q was repaired"
    assert one(owner, "select tube.recapture()") is None


def test_a_new_owner_detaches_a_table_that_another_had_attached(handed_over, admin):
    _, owner = handed_over
    owner.execute("select tube.tube_table_ensure_detached('q', 'own.mine')")
    owner.execute("insert into own.mine values (1)")
    assert touched(admin) == []


def test_a_new_owner_is_told_of_the_touch_function_that_is_anothers(handed_over):
    _, owner = handed_over
    told = []
    owner.add_notice_handler(lambda notice: told.append(notice.message_primary))
    attach(owner, "own.mine", shard=5)
    assert any("own.mine_touch" in message and "belongs to another owner" in message for message in told)


def test_a_function_of_anothers_that_is_called_like_ours_keeps_nobody_from_attaching(session, admin):
    owner, other = session("insert"), session("insert")
    names = [one(each, "select current_user::text") for each in (owner, other)]
    admin.execute(
        f"create schema own authorization {names[0]}; create schema others authorization {names[1]}"
    )
    owner.execute("create table own.mine (id bigint primary key)")
    attach(owner, "own.mine")
    token = one(admin, "select token from tube.attachment where tbl = 'own.mine'::regclass")
    other.execute(f"create function others.pgchange_judge_{token}() returns int as 'select 1' language sql")
    admin.execute("update tube.tube set predicate = 'id > 0' where name = 'q'")
    attach(owner, "own.mine")
    owner.execute("insert into own.mine values (-1), (1)")
    assert touched(admin) == [1]


@pytest.mark.parametrize(
    "asked",
    [
        "(tube.attachment_of('public.item'::regclass, 'q')).token",
        "tube.attached_name('public.item'::regclass, 'q')",
        "tube.key_names('public.item'::regclass, 'q')",
        "tube.pods_named('q')",
    ],
)
def test_a_role_learns_nothing_of_a_tube_that_it_does_not_see(session, asked):
    assert one(session("insert"), f"select {asked}") is not None
    assert one(session(), f"select {asked}") is None


@pytest.mark.parametrize("statement", ["truncate public.item", "insert into public.item values (1)"])
def test_a_session_without_row_security_is_captured(admin, role, connect_to, statement):
    owner = role("owner")
    admin.execute(
        f"grant usage, create on schema public to {owner.name}; grant usage on schema tubes to {owner.name}"
    )
    admin.execute(f"grant insert on tubes.q to {owner.name}; select tube.grant_consumer('{owner.name}')")
    admin.execute(f"alter table public.item owner to {owner.name}; select tube.recapture()")
    admin.execute("alter table tubes.q rename to p")
    connection = connect_to(owner.conninfo)
    connection.execute("set row_security = off")
    connection.execute(statement)
    assert one(admin, "select count(*) from tubes.p") == 1


def test_default_privileges_open_no_pods_to_anybody(connect, role):
    admin, app = connect(), role("app")
    admin.execute(f"alter default privileges grant all on tables to {app.name}")
    admin.execute("alter default privileges grant select on tables to public")
    make(admin, "opened")
    rights = "select has_table_privilege(%s, 'opened', 'select, insert, update, delete, truncate')"
    assert [one(admin, rights, who) for who in (app.name, "public")] == [False, False]
    assert one(admin, "select has_any_column_privilege(%s, 'opened', 'insert')", app.name) is False
