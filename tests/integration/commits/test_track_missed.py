"""Rows that were in a table when it became a partition have no commits. Health reports them until they are enqueued, each
once."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import schema
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.feeds import CommitFeed
from tests.commits import drain, narrow_partitions, use_up_transactions
from tests.findings import findings
from tests.partitioned import come
from tests.tubes import one

BRING = "select revision.enqueue_attached('public.high')"
CAME = (
    "public.item: rows of public.high may have been there before it was captured, and are in no commit; "
    f"as its owner: {BRING}"
)


def make(connection, branch=None):
    connection.execute(
        "create table item (id bigint primary key, n bigint default 0) partition by range (id);"
        "create table low partition of item for values from (0) to (10);"
        "create table high (id bigint primary key, n bigint default 0); insert into item values (1)"
    )
    connection.execute("select revision.track('item', branch_id => %s)", [branch])
    connection.execute("call revision.enqueue_existing('item')")
    return connection


@pytest.fixture
def item(connect):
    """A connection to a database with a tracked table that has a row in the queue."""
    return make(connect())


def refresh(item):
    return [line for (line,) in item.execute("select revision.recapture()")]


def troubles(item):
    return findings(item, "revision")


def commits(item):
    return [commit for (commit,) in item.execute("select commit_id from revision.commit_queue order by 1")]


@pytest.mark.parametrize("mend", ["select revision.recapture()", "select revision.track('item')"])
def test_rows_that_came_with_a_partition_are_told_with_the_call_that_brings_them(item, mend):
    told = []
    item.add_notice_handler(lambda notice: told.append(f"{notice.message_primary}; {notice.message_hint}"))
    come(item)
    item.execute(mend)
    assert told == [CAME]
    assert troubles(item) == [CAME]
    assert one(item, "select missed::text from revision.tracking()") == "{high}"


def test_repair_and_maintenance_report_rows_that_came_with_a_partition(item):
    come(item)
    assert refresh(item) == ["public.item: the capture was placed on 1 partitions", CAME]
    assert refresh(item) == []
    report = maintain(item)
    assert report.attention == [CAME]


def test_a_partition_that_comes_empty_misses_nothing(item):
    come(item, rows=None)
    refresh(item)
    assert troubles(item) == []


def test_rows_that_came_with_a_partition_are_enqueued_once_and_no_finding_any_more(item):
    come(item)
    item.execute("insert into item values (13)")
    refresh(item)
    item.execute("insert into item values (14); insert into high (id) values (15); update item set n = 1")
    assert one(item, BRING) == 2
    assert commits(item) == [1, 11, 12, 13, 14, 15]
    assert troubles(item) == []
    assert one(item, BRING) == 0


def test_an_expression_places_what_came(connect):
    item = make(connect(), "nullif(n, 0)")
    come(item)
    item.execute("update high set n = 7 where id = 11")
    refresh(item)
    assert one(item, BRING) == 1
    assert item.execute("select commit_id, branch_id from revision.commit_queue").fetchall() == [(11, 7)]


def test_partitions_that_came_with_rows_are_listed_in_the_order_of_their_creation(item):
    item.execute("create table higher (like high including all); insert into higher values (21)")
    item.execute("alter table item attach partition higher for values from (20) to (30)")
    come(item)
    told = []
    item.add_notice_handler(lambda notice: told.append(notice.message_primary))
    refresh(item)
    assert [line.split()[3] for line in told] == ["public.high", "public.higher"]


def test_of_a_tree_that_came_its_root_is_told(item):
    item.execute(
        "create table tree (id bigint primary key, n bigint default 0) partition by range (id);"
        "create table leaf partition of tree for values from (20) to (25); insert into tree values (20);"
        "alter table item attach partition tree for values from (20) to (30)"
    )
    refresh(item)
    [told] = troubles(item)
    assert "rows of public.tree may" in told
    assert one(item, "select revision.enqueue_attached('tree')") == 1
    assert troubles(item) == []


def test_what_enqueueing_the_existing_rows_would_double_comes_behind_it(connect):
    item = connect()
    item.execute(
        "create table item (id bigint primary key) partition by range (id);"
        "create table low partition of item for values from (0) to (30); insert into item values (25);"
        "create table high (id bigint primary key); insert into high values (-1);"
        "select revision.track('item');"
        "alter table item attach partition high for values from (-10) to (0)"
    )
    refresh(item)
    with pytest.raises(psycopg.Error, match="may still be put in the queue") as refused:
        item.execute(BRING)
    assert "call revision.enqueue_existing" in refused.value.diag.message_hint
    item.execute("call revision.enqueue_existing('item')")
    assert one(item, BRING) == 0
    assert (commits(item), troubles(item)) == ([-1, 25], [])


def test_a_commit_that_may_be_another_tables_does_not_count_as_captured(connect):
    item = make(connect(), "0")
    item.execute("insert into revision.commit (id) overriding system value values (11)")
    come(item)
    refresh(item)
    with pytest.raises(psycopg.Error, match="its branch may also have commits of other tables"):
        item.execute(BRING)
    assert troubles(item) == [CAME]


def trim(db, item):
    """Process everything in the queue, and let maintenance trim it."""
    own = one(item, "select branch_id from revision.tracked")
    use_up_transactions(item, 120)
    drain(db, feed=CommitFeed("c", own))
    assert "trimmed" in str(item.execute("select pubsub.trim_commit_queue('0 s')").fetchall())


def test_commits_that_were_trimmed_since_the_partition_came_do_not_come_again(db, item):
    narrow_partitions(item)
    come(item)
    item.execute("insert into item values (13)")
    refresh(item)
    trim(db, item)
    with pytest.raises(psycopg.Error, match="the history that would show this was trimmed"):
        item.execute(BRING)
    assert troubles(item) == [CAME]


def test_history_that_was_trimmed_before_the_partition_came_keeps_nothing_back(db, item):
    narrow_partitions(item)
    item.execute("insert into item values (2)")
    trim(db, item)
    come(item)
    refresh(item)
    assert one(item, BRING) == 2


def test_a_partition_that_came_empty_is_no_finding(item):
    assert one(item, "select revision.enqueue_attached('low')") == 0
    item.execute("create table other (id bigint primary key)")
    with pytest.raises(psycopg.Error, match="other is no part of a tracked table"):
        item.execute("select revision.enqueue_attached('other')")
    assert commits(item) == [1]


def test_rows_that_the_capture_of_a_former_owner_caught_are_not_missed(item, role):
    owner = role("owner").name
    item.execute(f"grant create on schema public to {owner}; select revision.grant_owner('{owner}')")
    item.execute(f"alter table item owner to {owner}; alter table low owner to {owner}")
    item.execute("select revision.track('item')")
    assert troubles(item) == []
    item.execute("insert into item values (2)")
    assert commits(item) == [1, 2]


def test_only_the_owner_brings_what_came(item, role, connect_to):
    come(item)
    refresh(item)
    who = role("stranger")
    item.execute("select revision.grant_owner(%s::regrole)", [who.name])
    item.execute(f"grant select on high to {who.name}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="only the owner of public.high"):
        connect_to(who.conninfo).execute(BRING)


def test_a_partition_that_was_detached_is_captured_no_more_when_its_table_is_untracked(item):
    item.execute("alter table item detach partition low")
    item.execute("select revision.untrack('item')")
    item.execute("insert into low values (2)")
    assert one(item, "select count(*) from revision.commit_queue where commit_id = 2") == 0
    assert one(item, "select count(*) from pg_proc where proname like 'pgchange_capture_%%'") == 0
    item.execute("select revision.track('item'); select revision.track('low')")


def test_a_partition_that_outlives_its_table_stays_writable_when_the_queue_is_uninstalled(item):
    item.execute("alter table item detach partition low; drop table item")
    schema.uninstall(item)
    item.execute("insert into low values (2)")
    assert one(item, "select count(*) from pg_proc where proname like 'pgchange_capture_%%'") == 0


def test_rows_that_came_with_a_partition_before_a_restore_come_once_after_it(item):
    come(item)
    refresh(item)
    use_up_transactions(item)
    item.execute("insert into item values (13)")
    item.execute("update revision.origin set written_in = '3'")
    item.execute("select pubsub.rebase_after_restore()")
    item.execute(BRING)
    assert commits(item) == [1, 11, 12, 13]


def test_commits_that_were_trimmed_before_a_restore_stay_in_doubt_after_it(item):
    come(item)
    refresh(item)
    item.execute("insert into item values (13)")
    item.execute(
        "with gone as (delete from revision.commit_queue where commit_id = 13 returning *) "
        "insert into revision.trimmed (branch_id, upto, commits) "
        "select branch_id, (txid::text::bigint + 1)::text::xid8, 1 from gone"
    )
    item.execute("update revision.origin set written_in = '3'")
    item.execute("select pubsub.rebase_after_restore()")
    with pytest.raises(psycopg.Error, match="trimmed"):
        item.execute(BRING)
