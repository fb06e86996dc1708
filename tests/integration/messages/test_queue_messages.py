"""Posting and receiving, as the manual of the queues describes it, paragraph by paragraph."""

from __future__ import annotations

from datetime import datetime, timedelta

import psycopg
import pytest

from tests.queues import consume, consumen, consumer, drain, fill, make, one, post, there

pytestmark = pytest.mark.hstore


def test_a_queue_is_made_with_its_functions_and_the_consumer_default(q):
    assert one(q, "select mbus.post_q('n=>1')").startswith("q.")
    assert one(q, "select data -> 'n' from mbus.consume_q_by_default()") == "1"
    assert q.execute("select name, qname, selector from mbus.consumer").fetchall() == [("default", "q", None)]


def test_making_a_queue_that_is_there_makes_its_functions_again_and_keeps_its_messages(q):
    post(q, 1)
    q.execute("drop function mbus.post_q")
    make(q)
    post(q, 2)
    assert drain(q) == ["1", "2"]


def test_post_returns_the_iid_which_is_the_queue_and_a_number(q):
    iid = one(q, "select mbus.post_q(data => 'n=>1', properties => 'a=>b')")
    queue, number = iid.split(".")
    assert queue == "q"
    assert number.isdigit()
    assert q.execute("select iid, properties -> 'a' from mbus.consume('q')").fetchone() == (iid, "b")


def test_a_message_comes_with_the_columns_of_qt_model(q):
    iid = post(q, 1, expires="1h")
    received = q.execute("select * from mbus.consume('q')")
    assert [column.name for column in received.description] == [
        "id", "added", "iid", "delayed_until", "expires", "received", "headers", "properties", "data",
    ]  # fmt: skip
    assert received.fetchone()[2] == iid


def test_a_delayed_message_is_delivered_after_its_time(q):
    post(q, "late", delay="0.3s")
    post(q, "later", delay="1h")
    post(q, "now")
    in_time = (
        "select data -> 'n', coalesce(delayed_until <= clock_timestamp()::timestamp, true) "
        "from mbus.consumen_q_by_default(10)"
    )
    found: dict[str, bool] = {}
    while "late" not in found:
        found |= dict(q.execute(in_time).fetchall())
    assert found == {"now": True, "late": True}


def test_a_delay_counts_in_the_time_zone_of_who_posts(q):
    q.execute("set timezone = 'Asia/Tokyo'")
    q.execute("select mbus.post_q('n=>1', delayed_until => (now() - interval '1s')::timestamp)")
    q.execute("select mbus.post_q('n=>2', delayed_until => (now() + interval '1h')::timestamp)")
    q.execute("set timezone = 'America/New_York'")
    assert drain(q) == ["1"]


def test_a_message_that_became_due_comes_before_those_that_were_added_after_it(q):
    post(q, 1, delay="0.2s")
    post(q, 2, delay="0.1s")
    post(q, 3)
    q.execute("select pg_sleep(0.21)")
    assert drain(q) == ["1", "2", "3"]


def test_an_expired_message_is_never_delivered_and_cleared_with_the_queue(q):
    post(q, "short", expires="0.1s")
    post(q, "short and delayed", expires="0.1s", delay="0.05s")
    post(q, "stays")
    assert one(q, "select data -> 'n' from mbus.peek('q.1')") == "short"
    q.execute("select pg_sleep(0.11)")
    assert drain(q) == ["stays"]
    assert there(q) == ["short", "short and delayed"]
    q.execute("select mbus.clear_queue_q()")
    assert there(q) == []
    assert one(q, 'select count(*) from mbus."log$q"') == 0


def test_a_message_is_posted_under_an_iid_that_was_had_before(q):
    iid = one(q, "select mbus.get_iid('q')")
    assert one(q, "select mbus.post_q('n=>1', iid => %s)", iid) == iid
    assert q.execute("select iid, data -> 'n' from mbus.consume('q')").fetchone() == (iid, "1")
    other = one(q, "select mbus.get_iid('q')")
    assert one(q, "select mbus.post('q', 'n=>1', iid => %s)", other) == other


def test_an_iid_of_another_queue_is_refused_and_one_of_the_dmq_is_not(q):
    make(q, "r")
    for call in [
        "select mbus.post_q('n=>1', iid => 'r.5')",
        "select mbus.post('q', 'n=>1', iid => 'nonsense')",
    ]:
        with pytest.raises(psycopg.Error, match=r"Wrong iid=\S+ for queue q"):
            q.execute(call)
    assert one(q, "select mbus.post_q('n=>1', iid => 'dmq.5')") == "dmq.5"
    assert one(q, "select (mbus.take('dmq.5')).iid is null")
    assert one(q, "select iid from mbus.consume('q')") == "dmq.5"


def test_two_messages_cannot_have_one_iid(q):
    iid = post(q, 1)
    with pytest.raises(psycopg.errors.UniqueViolation):
        post(q, 2, iid=iid)
    assert drain(q) == ["1"]


def test_a_message_received_by_one_process_is_not_received_by_another(q, connect):
    fill(q, [1, 2])
    first, second = connect(autocommit=False), connect(autocommit=False)
    assert consume(first) == "1"
    assert consume(second) == "2"
    assert consume(second) is None
    first.rollback()
    second.commit()
    assert drain(q) == ["1"]


def test_each_consumer_receives_its_copy(q):
    consumer(q, "other")
    fill(q, [1, 2])
    assert drain(q) == ["1", "2"]
    assert there(q) == ["1", "2"]
    assert consume(q, "other") == "1"
    assert there(q) == ["2"]
    assert drain(q, "other") == ["2"]
    assert there(q) == []


def test_a_selector_bounds_what_a_consumer_receives(q):
    consumer(q, "done", "(t.properties->'kind') = 'done'")
    consumer(q, "bare", "data->'n' = '2'")
    post(q, 1, kind="done")
    post(q, 2, kind="begun")
    post(q, 3)
    assert drain(q, "done") == ["1"]
    assert drain(q, "bare") == ["2"]
    assert drain(q) == ["1", "2", "3"]


def test_a_message_that_no_selector_matches_stays_until_the_queue_is_cleared(q):
    consumer(q, "some", "data->'n' = '1'")
    q.execute("select mbus.drop_consumer('default', 'q')")
    fill(q, [1, 2])
    assert drain(q, "some") == ["1"]
    q.execute("select mbus.maintain()")
    assert there(q) == ["2"]
    q.execute("select mbus.clear_queue_q()")
    assert there(q) == []


def test_consumen_receives_at_most_so_many_in_the_order_of_posting(q):
    fill(q, range(10))
    assert consumen(q, 3) == ["0", "1", "2"]
    assert consumen(q, 100) == [str(n) for n in range(3, 10)]


def test_the_headers_tell_where_a_message_came_from(q):
    database = q.info.dbname
    q.execute("select mbus.post_q('n=>1', headers => 'mine=>kept')")
    sent = 'source_db=>elsewhere, enqueue_time=>"2020-02-02 02:02:02", seenby=>"{elsewhere}"'
    q.execute("select mbus.post_q('n=>2', headers => %s)", [sent])
    query = (
        "select headers -> array['seenby', 'source_db', 'destination', 'destination_queue', 'mine'], "
        "(headers -> 'enqueue_time')::timestamp, added from mbus.consume('q')"
    )
    names, enqueued, added = q.execute(query).fetchone()
    assert names == [f"{{{database}}}", database, "q", "q", "kept"]
    assert abs(enqueued - added) < timedelta(seconds=1)
    names, enqueued, added = q.execute(query).fetchone()
    assert names == [f"{{elsewhere,{database}}}", "elsewhere", "q", "q", None]
    assert enqueued == datetime(2020, 2, 2, 2, 2, 2)


def test_nothing_is_received_from_an_empty_queue_or_where_all_parts_are_held(q, connect):
    assert consume(q) is None
    fill(q, range(100))
    holder = connect(autocommit=False)
    assert len(consumen(holder, 70)) == 70
    assert consumen(q, 50) == []
    assert consume(q) is None
    assert one(q, "select mbus.peek_q()") is True
    holder.rollback()
    assert len(drain(q)) == 100


def test_peek_tells_whether_a_message_or_any_is_there(q):
    assert one(q, "select mbus.peek_q()") is False
    iids = fill(q, [1, 2, 3])
    assert one(q, "select mbus.peek_q()") is True
    assert one(q, "select mbus.peek_q(%s)", iids[1]) is True
    assert one(q, "select mbus.peek_q('q.999')") is False
    assert consume(q) == "1"
    assert one(q, "select mbus.peek_q(%s)", iids[0]) is False
    assert drain(q) == ["2", "3"]
    assert one(q, "select mbus.peek_q()") is False


def test_is_msg_exists_and_peek_by_iid(q):
    iid = post(q, 1)
    assert one(q, "select mbus.is_msg_exists(%s)", iid)
    assert one(q, "select (mbus.peek(%s)).data -> 'n'", iid) == "1"
    assert drain(q) == ["1"]
    assert not one(q, "select mbus.is_msg_exists(%s)", iid)
    assert one(q, "select (mbus.peek(%s)).id is null", iid)


def test_received_names_the_consumers_that_have_a_message(q):
    for name in ("other", "third"):
        consumer(q, name)
    fill(q, [1])
    for names in (["default"], ["default", "third"]):
        assert drain(q, names[-1]) == ["1"]
        numbers = one(q, "select array_agg(id order by id) from mbus.consumer where name = any (%s)", names)
        assert one(q, 'select received from mbus."qt$q"') == numbers


def test_a_trigger_that_is_dropped_leaves_that_of_another_queue_to_the_same_copy(q):
    make(q, "p", "copies")
    for source in ("p", "q"):
        q.execute("select mbus.create_trigger(%s, 'copies')", [source])
    q.execute("select mbus.drop_trigger('p', 'copies')")
    assert q.execute("select src, dst from mbus.trigger").fetchall() == [("q", "copies")]


def test_a_queue_is_dropped_without_touching_one_whose_name_begins_alike(q):
    make(q, "q_more", "q2")
    consumer(q, "other")
    post(q, 1, "q_more")
    q.execute("select mbus.drop_queue('q')")
    assert drain(q, queue="q_more") == ["1"]
    post(q, 2, "q2")
    rows = q.execute(
        "select proname from pg_proc where pronamespace = 'mbus'::regnamespace "
        "and proname ~ '_q(_|$)' and proname !~ 'q_more'"
    )
    assert rows.fetchall() == []
    assert (
        one(q, "select count(*) from mbus.position where consumer not in (select id from mbus.consumer)") == 0
    )
    with pytest.raises(psycopg.Error, match="Unknown queue:q"):
        post(q, 1)
    make(q)
    assert drain(q) == []


def test_a_queue_that_is_dropped_and_made_anew_gives_no_id_twice(q):
    gone = fill(q, [1, 2, 3])
    make(q, "r")
    q.execute("select mbus.drop_queue('q')")
    make(q)
    post(q, "behind", "r", after=[gone[0]])
    assert fill(q, [4, 5, 6, 7]) == ["q.4", "q.5", "q.6", "q.7"]
    assert drain(q, queue="r") == ["behind"]
    assert drain(q) == ["4", "5", "6", "7"]
    assert one(q, "select mbus.trim(k, 4) from mbus.queue as k where qname = 'q'") == 4


def test_a_batch_is_posted_by_copy(q):
    with q.cursor().copy('copy mbus."log$q" (data) from stdin') as copy:
        for n in range(10):
            copy.write_row([f"n=>{n}"])
    row = q.execute("select iid, headers ? 'seenby' from mbus.consume('q')").fetchone()
    assert row == ("q.1", True)
    assert drain(q) == [str(n) for n in range(1, 10)]


def test_a_new_consumer_receives_what_is_there_and_not_what_is_gone(q):
    fill(q, range(10))
    assert consumen(q, 3) == ["0", "1", "2"]
    post(q, "later", delay="1h")
    consumer(q, "late")
    consumer(q, "picky", "data->'n' = '5'")
    assert drain(q, "late") == [str(n) for n in range(3, 10)]
    assert drain(q, "picky") == ["5"]
    assert drain(q) == [str(n) for n in range(3, 10)]


@pytest.mark.parametrize("table", ["log$q", "position", "level", "apart", "receipt", "wake", "tempq"])
def test_the_most_written_tables_of_queues_are_vacuumed_early(q, table):
    options = one(q, "select reloptions from pg_class where oid = %s::regclass", f'mbus."{table}"')
    scales = [option for option in options if option.startswith("autovacuum_vacuum_scale_factor=")]
    assert [float(scale.partition("=")[2]) <= 0.01 for scale in scales] == [True]


def test_estimated_messages_counts_what_is_there(q):
    fill(q, range(10))
    assert one(q, "select mbus.estimated_messages('q')") == 10
    consumen(q, 4)
    assert one(q, "select mbus.estimated_messages('q')") == 6


def test_a_queue_that_is_not_there_has_no_number_of_messages(q):
    said: list[str | None] = []
    q.add_notice_handler(lambda notice: said.append(notice.message_primary))
    assert one(q, "select mbus.estimated_messages('nowhere')") is None
    assert said == ["Queue nowhere does not exists"]


def test_a_view_receives_and_posts(q):
    q.execute("select mbus.create_view('q')")
    q.execute("insert into public.q_q (data) values ('n=>1')")
    assert one(q, "select data -> 'n' from public.q_q") == "1"
    q.execute("select mbus.create_view('q', 'default', 'public', 'mine')")
    q.execute("insert into mine (data, delayed_until) values ('n=>1', localtimestamp + interval '1 h')")
    assert one(q, "select count(*) from mine") == 0
    iid = one(q, "select mbus.get_iid('q')")
    q.execute("insert into mine (data, iid) values ('n=>2', %s)", [iid])
    assert one(q, "select mbus.peek_q(%s)", iid)
    assert one(q, "insert into mine (data) values ('n=>3') returning iid") == "q.5"
    q.execute("select mbus.drop_queue('q')")
    assert one(q, "select to_regclass('public.q_q') is null")
