"""Helpers for tests of DAGs: the input that they refuse, and their records."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from airflow.sdk import DAG, task
from psycopg import sql

from airflow_pgchange.errors import HandlerFailed, InvalidArgument
from airflow_pgchange.events import Event, Handler
from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.messages import RollBack, TryAgain
from airflow_pgchange.operators import BatchOperator, EventHandlersOperator, SagaHandlerOperator
from airflow_pgchange.testing import (
    RecordedConnection,
    Statement,
    batch_of,
    changes_of,
    run_batch_once,
    run_step_once,
)

COMMITS = CommitFeed("c", 0)
TUBE = TubeFeed("copies")
EVENTS = EventFeed("g")


def keep(batch: Any, changes: Any, connection: Any) -> None:
    for change in changes:
        connection.execute("insert into kept values (%s)", [change.id])


def batches(process: Any = keep, **arguments: Any) -> BatchOperator:
    return BatchOperator(task_id="t", feed=COMMITS, process=process, postgres_conn_id="shop", **arguments)


def test_changes_have_what_each_feed_gives() -> None:
    (touched,) = changes_of(TUBE, [{"id": 7, "shard": 2, "payload": {"who": "ann"}}])
    assert (touched.id, touched.data) == (7, {"shard": 2, "backfill": False, "payload": {"who": "ann"}})
    event, scheduled = changes_of(EVENTS, [Event("t", {"n": 1}), {"topic": "u", "subscription_ids": ["s"]}])
    assert (event.data["topic"], event.data["payload"], event.data["subscription_ids"]) == ("t", {"n": 1}, [])
    assert (scheduled.data["topic"], scheduled.data["subscription_ids"]) == ("u", ["s"])
    assert event.id < scheduled.id
    (message,) = changes_of(QueueFeed("q"), [{"data": {"a": "1"}}])
    assert message.data == {"data": {"a": "1"}, "properties": {}, "headers": {}}
    (changed,) = changes_of(TopologyFeed("c"), [{"event": {"op": "set"}}])
    assert (changed.id, changed.data) == ("1/1", {"op": "set"})
    assert [change.id for change in changes_of(COMMITS, [3, {"id": 4}])] == [3, 4]


def test_ids_of_other_types_are_strings_and_of_several_columns_tuples() -> None:
    assert [change.id for change in changes_of(COMMITS, ["7f", {"id": "a"}])] == ["7f", "a"]
    assert [change.id for change in changes_of(TUBE, [(1, "a")])] == [(1, "a")]
    assert batch_of(COMMITS, [1]).key == ("bigint",)
    assert batch_of(COMMITS, ["7f"]).key == ("text",)
    assert batch_of(TUBE, [(1, "a")]).key == ("bigint", "text")
    assert batch_of(TUBE, [{"id": (1, "7f")}], key=["bigint", "uuid"]).key == ("bigint", "uuid")
    assert batch_of(TopologyFeed("c"), [{"event": {}}]).key == ("bigint",)


def test_a_batch_tells_the_shards_and_the_oldest_of_its_changes() -> None:
    given = [{"id": 1, "shard": 2}, {"id": 2, "shard": 1}, {"id": 3, "shard": 2}]
    batch = batch_of(TUBE, given, attempt=3)
    assert [(part.upto[0], part.count) for part in batch.slices] == [(1, 1), (2, 2)]
    assert (batch.count, batch.attempt, batch.feed) == (3, 3, "tube:copies/0")
    assert batch.oldest == changes_of(TUBE, given)[0].created_at.isoformat()
    assert type(batch).from_json(batch.to_json()) == batch


@pytest.mark.parametrize(
    ("feed", "given", "told"),
    [
        (
            COMMITS,
            [{"id": 1, "topic": "t"}],
            "change 1 has topic, but the columns of a commit feed are id, queue_id",
        ),
        (EVENTS, [{"payload": {}}], "change 1 of a event feed lacks topic"),
        (COMMITS, [1.5], "a change must be an id, a mapping of columns to values, or an Event, not 1.5"),
        (COMMITS, ["a", 1], "change 2 has the id 1, and ids of this batch have the columns text"),
        (TUBE, [(1, "a"), (1, "a", 2)], r"change 2 has the id \(1, 'a', 2\)"),
        (COMMITS, [True], "or an Event, not True"),
        (COMMITS, [], "a feed never has an empty batch"),
    ],
)
def test_changes_that_no_feed_gives_are_refused(feed: Any, given: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        batch_of(feed, given)


def test_statements_are_recorded_as_they_are_executed_and_what_is_rolled_back_is_not() -> None:
    def write(batch: Any, changes: Any, connection: Any) -> None:
        connection.execute(sql.SQL("truncate {}").format(sql.Identifier("a b")))
        with connection.cursor() as cursor:
            cursor.executemany("insert into t values (%s)", [(1,), (2,)])
            with cursor.copy("copy t from stdin") as copy:
                copy.write_row([3])
                copy.write_row([4])
        for end in (ValueError("no"), psycopg.Rollback()):
            try:
                with connection.transaction(), connection.transaction():
                    connection.execute(b"delete from t")
                    raise end
            except ValueError:
                connection.execute("insert into failed values (1)")
        with connection.transaction() as outer, connection.transaction():
            connection.execute("delete from t")
            raise psycopg.Rollback(outer)

    assert run_batch_once(batches(write), [1]).statements == (
        Statement('truncate "a b"'),
        Statement("insert into t values (%s)", (1,)),
        Statement("insert into t values (%s)", (2,)),
        Statement("copy t from stdin", [(3,), (4,)]),
        Statement("insert into failed values (1)"),
    )


def test_results_of_a_statement_can_be_read_in_every_way() -> None:
    connection = RecordedConnection(lambda statement: [(1,), (2,), (3,)])
    cursor = connection.execute("select")
    assert (cursor.rowcount, cursor.fetchone(), cursor.fetchmany(1), cursor.fetchall()) == (
        3,
        (1,),
        [(2,)],
        [(3,)],
    )
    assert (cursor.fetchone(), cursor.rowcount) == (None, 3)
    assert (
        list(connection.execute("select")) == list(connection.cursor().stream("select")) == [(1,), (2,), (3,)]
    )


@pytest.mark.parametrize("read", ["fetchone", "fetchall", "fetchmany"])
def test_a_helper_that_needs_a_server_raises_an_error_that_says_so(read: str) -> None:
    def select(batch: Any, changes: Any, connection: Any) -> None:
        getattr(connection.execute("select 1"), read)()

    def listen(batch: Any, changes: Any, connection: Any) -> None:
        connection.add_notify_handler(print)

    with pytest.raises(InvalidArgument, match="reads the rows of 'select 1', and this test has no"):
        run_batch_once(batches(select), [1])
    with pytest.raises(AttributeError, match="connection.add_notify_handler needs a server"):
        run_batch_once(batches(listen), [1])


def test_the_last_attempt_of_a_task_that_gives_up_is_a_dead_letter() -> None:
    def fail(batch: Any, changes: Any, connection: Any) -> None:
        connection.execute("insert into t values (1)")
        raise ValueError(batch.attempt)

    giving_up = batches(fail, max_attempts=3, on_give_up="dead_letter")
    with pytest.raises(ValueError, match="2"):
        run_batch_once(giving_up, [1], attempt=2)
    last = run_batch_once(giving_up, [1], attempt=3)
    assert (repr(last.dead_letter), last.statements) == ("ValueError(3)", ())
    with pytest.raises(ValueError, match="3"):
        run_batch_once(batches(fail, max_attempts=3, on_give_up="fail"), [1], attempt=3)


def test_the_last_attempt_on_a_single_change_is_a_dead_letter_and_on_several_an_error() -> None:
    def fail(batch: Any, changes: Any, connection: Any) -> None:
        raise error

    giving_up, error = batches(fail, max_attempts=3), Exception("bad")
    with pytest.raises(Exception, match="bad"):
        run_batch_once(giving_up, [1], attempt=2)
    assert run_batch_once(giving_up, [1], attempt=3).dead_letter is error
    with pytest.raises(Exception, match="bad"):
        run_batch_once(giving_up, [1, 2], attempt=3)
    error = ConnectionResetError("bad")
    with pytest.raises(ConnectionResetError):
        run_batch_once(giving_up, [1], attempt=3)


def test_a_batch_has_no_more_changes_than_the_task_takes() -> None:
    with pytest.raises(InvalidArgument, match="t: a batch has at most limit=2 changes, not 3: give fewer"):
        run_batch_once(batches(limit=2), [1, 2, 3])


def test_the_task_of_a_dag_is_the_only_one_or_is_named() -> None:
    with DAG("d") as dag:
        first, second = (
            batches(),
            BatchOperator(task_id="u", feed=TUBE, process=keep, postgres_conn_id="shop"),
        )
    with pytest.raises(
        InvalidArgument, match="DAG d: task_id= must name a task of .*, not None; it has t, u"
    ):
        run_batch_once(dag, [1])
    assert run_batch_once(dag, [1], task_id="u").batch.feed == "tube:copies/0"
    assert run_batch_once(dag, [1], task_id="t").batch.feed == run_batch_once(first, [1]).batch.feed
    with pytest.raises(InvalidArgument, match="not 'x'; it has t, u"):
        run_batch_once(dag, [1], task_id="x")
    with pytest.raises(InvalidArgument, match="is no task of SagaHandlerOperator"):
        run_step_once(second, {}, step="room")
    with pytest.raises(InvalidArgument, match="DAG e: .* it has none"):
        run_batch_once(DAG("e"), [1])


def test_values_of_other_tasks_can_be_given() -> None:
    with DAG("d") as dag:

        @task
        def earlier() -> int:
            return 1

        @task.pgchange_batch(feed=COMMITS, postgres_conn_id="shop", limit="{{ params.most }}")
        def add(changes: Any, connection: Any, factor: int, run_id: Any = None) -> None:
            connection.execute("insert", [run_id, *(factor * change.id for change in changes)])

        made = add(earlier())

    context = {"params": {"most": 2}, "run_id": "r"}
    for found in (dag, made):
        (statement,) = run_batch_once(found, [1, 2], arguments={"factor": 10}, context=context).statements
        assert statement.parameters == ["r", 10, 20]
    with pytest.raises(
        InvalidArgument, match="add: another task gives factor, and in a test it does not run"
    ):
        run_batch_once(dag, [1], context=context)
    with pytest.raises(InvalidArgument, match="at most limit=2"):
        run_batch_once(dag, [1, 2, 3], arguments={"factor": 10}, context=context)
    with pytest.raises(InvalidArgument, match="limit must be a number from 1"):
        run_batch_once(dag, [1], arguments={"factor": 10}, context={"params": {"most": 0}})
    with pytest.raises(
        InvalidArgument,
        match="t has no argument factor that another task could give: such arguments are feed",
    ):
        run_batch_once(batches(), [1], arguments={"factor": 10})


def test_a_mapped_task_is_given_the_values_of_one_run() -> None:
    with DAG("d") as dag:

        @task
        def tubes() -> list[Any]:
            return []

        BatchOperator.partial(task_id="t", process=keep, postgres_conn_id="shop").expand(feed=tubes())

        @task.pgchange_batch(feed=COMMITS, postgres_conn_id="shop")
        def add(connection: Any, factor: int, unit: str) -> None:
            connection.execute("insert", [factor, unit])

        add.partial(unit="km").expand(factor=[1, 2])

    run = run_batch_once(dag, [5], task_id="t", arguments={"feed": TUBE})
    assert (run.batch.feed, run.statements[0].parameters) == ("tube:copies/0", [5])
    with pytest.raises(InvalidArgument, match="t is mapped over feed: give the value of one run"):
        run_batch_once(dag, [5], task_id="t")
    (statement,) = run_batch_once(dag, [5], task_id="add", arguments={"factor": 3}).statements
    assert statement.parameters == [3, "km"]


def test_templates_know_the_task_its_dag_and_the_defaults_of_its_parameters() -> None:
    with DAG("d", params={"most": 2}) as dag:
        batches(limit="{{ params.most }}", doc="d", process=keep)
    with pytest.raises(InvalidArgument, match="at most limit=2"):
        run_batch_once(dag, [1, 2, 3])
    assert run_batch_once(dag, [1, 2, 3], context={"params": {"most": 3}}).batch.count == 3

    with DAG("e") as named:

        @task.pgchange_batch(feed=COMMITS, postgres_conn_id="shop")
        def note(connection: Any, name: str, dag: Any = None) -> None:
            connection.execute("insert", [name, dag.dag_id])

        note(name="{{ dag.dag_id }}.{{ task.task_id }}")

    assert run_batch_once(named, [1]).statements[0].parameters == ["e.note", "e"]


def test_a_task_stays_what_it_was() -> None:
    operator = BatchOperator(task_id="t", feed=COMMITS, process=keep, postgres_conn_id="{{ params.shop }}")
    run_batch_once(operator, [1], context={"params": {"shop": "a"}})
    assert operator.postgres_conn_id == "{{ params.shop }}"


def handlers(*given: Handler, **arguments: Any) -> EventHandlersOperator:
    return EventHandlersOperator(task_id="t", group="g", handlers=given, postgres_conn_id="shop", **arguments)


def test_handlers_get_the_events_that_are_theirs_by_key_and_in_order() -> None:
    seen: dict[str, list[list[Any]]] = {"all": [], "odd": []}

    def note(delivery: Any) -> None:
        seen[delivery.handler].append([(event.payload, delivery.attempt) for event in delivery.events])

    operator = handlers(
        Handler("all", note, key=lambda event: event.payload % 2), Handler("odd", note, subscriptions=["odd"])
    )
    events = [Event("t", n, subscriptions=("odd",) if n % 2 else ("even",)) for n in range(4)]
    assert run_batch_once(operator, events).failures == ()
    assert sorted(seen["all"]) == [[(0, 1), (2, 1)], [(1, 1), (3, 1)]]
    assert seen["odd"] == [[(1, 1), (3, 1)]]
    run_batch_once(operator, events[:1], attempt=2)
    assert seen["all"][2:] == [[(0, 2)]]
    assert len(seen["odd"]) == 1


def test_a_handler_without_retries_fails_its_task() -> None:
    def fail(delivery: Any) -> None:
        raise ValueError("poison")

    with pytest.raises(HandlerFailed, match="group g: handler h failed on 1 events") as failed:
        run_batch_once(handlers(Handler("h", fail, retries=None)), [Event("t")])
    assert isinstance(failed.value.__cause__, ValueError)
    assert run_batch_once(handlers(Handler("h", fail, reliable=False)), [Event("t")]).failures == ()
    with pytest.raises(InvalidArgument, match="t: handlers open connections of their own"):
        run_batch_once(handlers(Handler("h", fail)), [Event("t")], postgres_conn_id="shop")


def test_a_decorated_handler_gets_its_own_arguments() -> None:
    sent = []
    with DAG("d") as dag:

        @task.pgchange_handler(group="mails", postgres_conn_id="shop", limit=2)
        def send(delivery: Any, sender: str) -> None:
            sent.append((sender, [event.payload for event in delivery.events]))

        send(sender="{{ params.who }}")

    run = run_batch_once(dag, [Event("t", n) for n in range(3)], context={"params": {"who": "ann"}})
    assert (sent, run.batch.feed) == ([("ann", [0, 1]), ("ann", [2])], "events:mails")


def saga(do: Any) -> SagaHandlerOperator:
    return SagaHandlerOperator(task_id="t", queue_name="q", do=do, postgres_conn_id="shop")


def test_a_step_keeps_what_it_wrote_only_if_it_is_done() -> None:
    def book(work: Any, connection: Any) -> Any:
        connection.execute("insert", [work.step, work.data["n"], work.kind, work.attempt])
        return answers[work.data["n"]]

    answers = {"1": None, "2": TryAgain("later", 5), "3": RollBack("never")}
    done = run_step_once(saga(book), {"n": "1"}, step="room", attempt=2)
    assert (done.answer, done.statements[0].parameters) == (None, ["room", "1", "step", 2])
    for n in ("2", "3"):
        run = run_step_once(saga(book), {"n": n}, step="room")
        assert (run.answer, run.statements) == (answers[n], ())
    assert run_step_once(saga(book), {"n": "1"}, kind="end").statements[0].parameters[0] is None


def test_what_no_handler_of_a_saga_may_answer_is_refused_as_in_airflow() -> None:
    with pytest.raises(InvalidArgument, match="the handler answered 7: None says that it is done"):
        run_step_once(saga(lambda work, connection: 7), {}, step="room")
    with pytest.raises(InvalidArgument, match="a compensation cannot be rolled back"):
        run_step_once(saga(lambda work, connection: RollBack("no")), {}, step="room", kind="compensation")
    with pytest.raises(InvalidArgument, match="a step needs the name of its step: give step="):
        run_step_once(saga(keep), {})
    with pytest.raises(InvalidArgument, match="a end has no step: leave out step="):
        run_step_once(saga(keep), {}, step="room", kind="end")


def test_a_decorated_step_gets_its_own_arguments() -> None:
    with DAG("d") as dag:

        @task.pgchange_saga(queue_name="rooms", postgres_conn_id="shop")
        def book(work: Any, connection: Any, hotel: str) -> None:
            connection.execute("insert", [work.step, hotel])

        book(hotel="Ritz")

    assert run_step_once(dag, {}, step="room").statements == (Statement("insert", ["room", "Ritz"]),)
