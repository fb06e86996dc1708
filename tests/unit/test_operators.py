"""Airflow's handling of every operator: it can be created, serialised and mapped."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.sdk import DAG

from airflow_pgchange.decorators.batch import pgchange_batch_task
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events import Handler
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.operators import TubeAttachOperator, TubeRecomputeOperator, TubeTouchOperator
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.claim import ConsumerOperator
from airflow_pgchange.operators.handlers import EventHandlersOperator
from airflow_pgchange.operators.sagas import SagaHandlerOperator
from airflow_pgchange.utils.compat import dag_serialization
from tests.every_operator import (
    ARGUMENTS,
    COMMITS,
    FEED,
    nothing,
    ours,
    own_arguments,
)

EVERY = pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)


def test_every_operator_is_looked_at() -> None:
    assert set(ours()) == set(ARGUMENTS)


@EVERY
def test_every_argument_is_looked_at(kind: Any) -> None:
    assert set(own_arguments(kind)) <= set(ARGUMENTS[kind])


def serialised(dag: DAG) -> Any:
    """Serialise a DAG to JSON and back, as the scheduler does. Return its only task."""
    stored = json.loads(json.dumps(dag_serialization().to_dict(dag)))
    dag_serialization().validate_schema(stored)
    return dag_serialization().from_dict(stored).get_task("task")


NO_FUNCTIONS = [
    (
        BatchOperator,
        {"feed": COMMITS, "process": "mine.keep"},
        "process must be a function, not 'mine.keep' of type str",
    ),
    (
        BatchOperator,
        {"feed": COMMITS, "process": None},
        "process must be a function, not None of type NoneType",
    ),
    (
        SagaHandlerOperator,
        {"queue_name": "q", "do": "mine.book"},
        "do must be a function, not 'mine.book' of type str",
    ),
    (
        EventHandlersOperator,
        {"group": "g", "handlers": "mine.keep"},
        "handlers must be a list of Handler objects, not 'mine.keep'",
    ),
    (
        EventHandlersOperator,
        {"group": "g", "handlers": [Handler("h", nothing), nothing]},
        "handlers must be a list of Handler objects, not <function nothing",
    ),
]


@pytest.mark.parametrize(("kind", "arguments", "told"), NO_FUNCTIONS)
def test_a_value_that_is_no_function_is_refused_in_the_constructor(
    kind: Any, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(told)):
        kind(task_id="t", **arguments)


@EVERY
def test_every_operator_is_serialised_with_all_its_arguments(kind: Any) -> None:
    with DAG("plain") as dag:
        kind(task_id="task", **ARGUMENTS[kind])
    assert serialised(dag).task_type == kind.__name__


@EVERY
def test_every_operator_is_serialised_mapped_over_any_of_its_arguments(kind: Any) -> None:
    given = ARGUMENTS[kind]
    with DAG("mapped") as dag:
        kind.partial(task_id="task", **{**given, "postgres_conn_id": "shop"}).expand(doc=["a", "b"])
    assert serialised(dag).is_mapped
    for name in set(own_arguments(kind)) & set(given) - {"python_callable", "op_args", "op_kwargs"}:
        rest = {one: value for one, value in given.items() if one != name}
        with DAG("mapped") as dag:
            kind.partial(task_id="task", **rest).expand(**{name: [given[name]] * 2})
        assert serialised(dag).is_mapped, name


def test_the_decorator_is_serialised_plain_and_mapped() -> None:
    with DAG("plain") as dag:
        pgchange_batch_task(task_id="task", **FEED)(lambda batch: None)()
    assert not serialised(dag).is_mapped
    with DAG("mapped") as dag:
        pgchange_batch_task(task_id="task", **FEED)(lambda batch, n: None).expand(n=[1, 2])
    assert serialised(dag).is_mapped


@pytest.mark.parametrize(
    ("args", "named", "reason"),
    [((1, 2), {}, "too many"), ((1,), {"n": 2}, "multiple values"), ((), {"m": 2}, "'m'")],
)
def test_arguments_that_a_decorated_function_cannot_take_are_told_where_the_dag_is_read(
    args: Any, named: Any, reason: str
) -> None:
    with DAG("plain"), pytest.raises(TypeError, match=reason):
        pgchange_batch_task(task_id="task", **FEED)(lambda batch, n: None)(*args, **named)


def test_a_decorated_function_may_be_given_some_of_its_arguments_by_place_and_some_not_at_all() -> None:
    with DAG("plain"):
        given = pgchange_batch_task(task_id="task", **FEED)(lambda batch, n, m=2, k=3: None)(1, k=4)
    assert given.operator.op_kwargs == {"n": 1, "k": 4}


@EVERY
def test_a_part_of_a_dag_can_be_taken_whatever_operators_it_has(kind: Any) -> None:
    with DAG("whole") as whole:
        kind(task_id="task", **ARGUMENTS[kind])
    assert whole.partial_subset("task").task_ids == ["task"]


class Connected(Exception):
    """Records the queries that a task sends to the first server to which it connects."""


@pytest.mark.parametrize(
    "kind",
    [kind for kind in ARGUMENTS if not issubclass(kind, ConsumerOperator)],
    ids=lambda kind: kind.__name__,
)
def test_a_task_that_hands_out_no_batch_begins_on_a_server_that_takes_writes(
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(conninfo: str, **_: Any) -> None:
        raise Connected(conninfo)

    for name in ("SHOP", "HISTORY"):
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", "postgres://standby,primary/air")
    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    with pytest.raises(Connected, match="target_session_attrs=read-write"):
        kind(task_id="task", **ARGUMENTS[kind]).execute({})


def test_a_copy_of_what_was_asked_to_stop_is_not_asked() -> None:
    stop = Stop()
    copied = copy.deepcopy(stop)
    stop.ask()
    assert (stop(), copied()) == (True, False)


def test_a_batch_is_of_the_same_size_by_an_operator_and_by_the_library():
    plain = BatchOperator(task_id="t", feed=COMMITS, process=nothing)
    assert plain.limit == Plan(COMMITS, "").limit == 100_000


@pytest.mark.parametrize(
    ("kind", "name"),
    [(TubeTouchOperator, "query"), (TubeRecomputeOperator, "query"), (TubeAttachOperator, "predicate")],
)
def test_sql_can_be_in_a_file_that_is_a_template(tmp_path: Path, kind: Any, name: str) -> None:
    (tmp_path / "given.sql").write_text("select {{ params.n }} -- %(ids)s")
    with DAG("files", template_searchpath=str(tmp_path)):
        task = kind(task_id="task", **{**ARGUMENTS[kind], name: "given.sql"})
    task.resolve_template_files()
    task.render_template_fields({"params": {"n": 7}})
    assert getattr(task, name) == "select 7 -- %(ids)s"


@pytest.mark.parametrize(
    ("kind", "field", "named"),
    [
        (TubeTouchOperator, "tube", ["audit.sql"]),
        (TubeAttachOperator, "tube", "audit.sql"),
        (TubeAttachOperator, "tables", ["public.plane", "audit.sql"]),
        (TubeAttachOperator, "key", "made.sql"),
    ],
)
def test_a_text_that_looks_like_a_file_name_is_not_looked_up_as_sql(
    tmp_path: Path, kind: Any, field: str, named: Any
) -> None:
    (tmp_path / "audit.sql").write_text("something else")
    with DAG("files", template_searchpath=str(tmp_path)):
        task = kind(task_id="task", **{**ARGUMENTS[kind], field: named})
    task.resolve_template_files()
    task.render_template_fields({})
    assert getattr(task, field) == named


def test_a_mapped_task_finds_its_sql_in_files_too(tmp_path: Path) -> None:
    (tmp_path / "given.sql").write_text("select {{ params.n }}")
    given = {name: value for name, value in ARGUMENTS[TubeTouchOperator].items() if name != "query"}
    with DAG("files", template_searchpath=str(tmp_path)) as dag:
        mapped = TubeTouchOperator.partial(task_id="task", **given).expand(query=["given.sql"])
    # Prepare the run of a mapped task as Airflow does.
    task = mapped.unmap({"query": "given.sql"})
    environment = dag.get_template_env(force_sandboxed=False)
    task._do_render_template_fields(task, mapped.template_fields, {"params": {"n": 7}}, environment, set())
    assert task.query == "select 7"
