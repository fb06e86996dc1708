"""Arguments of every operator and sensor: templated, and checked when the operator is created and again when they are
rendered."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.sagas import StartSagaOperator
from airflow_pgchange.sensors.sagas import SagaSensor
from airflow_pgchange.utils import arguments as kinds
from airflow_pgchange.utils.arguments import CheckedArguments, is_template
from tests.every_operator import (
    ARGUMENTS,
    COMMITS,
    FIXED,
    SAGA,
    nothing,
    own_arguments,
)

EVERY = pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)
CHECKED = [(kind, name) for kind in ARGUMENTS for name in kind.arguments]  # type: ignore[attr-defined]
AIRFLOWS = {"poke_interval"}
ONE = pytest.mark.parametrize(("kind", "name"), CHECKED, ids=lambda one: getattr(one, "__name__", one))


@EVERY
def test_every_size_and_every_time_can_be_templated(kind: Any) -> None:
    assert issubclass(kind, CheckedArguments)
    assert set(kind.arguments) <= set(kind.template_fields)
    sizes_and_times = {
        name
        for name, type in own_arguments(kind).items()
        if re.match("Seconds|Number|Until|timedelta|float|int", type) and name not in AIRFLOWS
    }
    assert sizes_and_times <= set(kind.arguments)


@ONE
def test_an_argument_that_is_a_template_is_checked_once_it_is_rendered(kind: Any, name: str) -> None:
    if name in FIXED.get(kind, ()):
        return
    given = ARGUMENTS[kind].get(name)
    task = kind(task_id="task", **{**ARGUMENTS[kind], name: "{{ given }}"})
    assert getattr(task, name) == "{{ given }}"
    plain = getattr(kind(task_id="task", **ARGUMENTS[kind]), name)
    with DAG("native", render_template_as_native_obj=True) as dag:
        dag.add_task(task)
    task.render_template_fields({"given": given if plain is None or callable(given) else plain})
    assert getattr(task, name) == plain


NUMBERS = {kinds.count: (0, -1, 1.5, "many", True, 2**31, []), kinds.whole: (1.5, "many", 2**31, [])}
TIMES = ("soon", -1, float("nan"), float("inf"), 10**400, timedelta(minutes=-1), True, [])


@ONE
def test_an_invalid_argument_is_refused_by_its_name(kind: Any, name: str) -> None:
    if name in FIXED.get(kind, ()):
        return
    for wrong in refused_by(kind.arguments[name]):
        with pytest.raises(InvalidArgument, match=name):
            kind(task_id="task", **{**ARGUMENTS[kind], name: wrong})
        task = kind(task_id="task", **{**ARGUMENTS[kind], name: "{{ given }}"})
        with pytest.raises(InvalidArgument, match=name):
            setattr(task, name, wrong)


def refused_by(check: Any) -> tuple[Any, ...]:
    """Return the invalid values for a check of a number or of a time. Return an empty tuple for any other check."""
    for one, wrong in NUMBERS.items():
        if is_same(check, one):
            return wrong
    return TIMES if is_same(check, kinds.seconds) else ()


def is_same(check: Any, other: Any) -> bool:
    """Whether ``check`` is ``other``, or ``other`` for an argument that may be left out."""
    inner = inspect.getclosurevars(check).nonlocals if inspect.isfunction(check) else {}
    return check is other or inner.get("check") is other


DURATIONS = [
    (kind, name)
    for kind, name in CHECKED
    if is_same(kind.arguments[name], kinds.seconds)  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("kind", "name"), DURATIONS, ids=lambda one: getattr(one, "__name__", one))
def test_a_duration_is_seconds_their_text_a_span_or_a_timedelta(kind: Any, name: str) -> None:
    for given in (60, "60", "1 min", timedelta(minutes=1)):
        assert getattr(kind(task_id="task", **{**ARGUMENTS[kind], name: given}), name) == 60


@pytest.mark.parametrize(
    ("unit", "length"),
    [
        ("second", timedelta(seconds=1)),
        ("sec", timedelta(seconds=1)),
        ("s", timedelta(seconds=1)),
        ("minute", timedelta(minutes=1)),
        ("min", timedelta(minutes=1)),
        ("hour", timedelta(hours=1)),
        ("h", timedelta(hours=1)),
        ("day", timedelta(days=1)),
        ("week", timedelta(weeks=1)),
    ],
)
def test_a_span_has_any_unit_also_in_the_plural(unit: str, length: timedelta) -> None:
    for given in (f"3 {unit}", f"3 {unit}s"):
        assert kinds.seconds("pause", given) == 3 * length.total_seconds()


@pytest.mark.parametrize("given", [60, "60", "1 minute", timedelta(minutes=1)])
def test_a_task_may_work_until_any_duration_is_over(given: Any) -> None:
    assert kinds.until("until", given) == kinds.seconds("pause", given) == 60


@pytest.mark.parametrize("wrong", ["full", 0, None, -1, "", []])
def test_a_task_works_until_nothing_is_left_or_a_time_is_over_and_not_otherwise(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="until"):
        kinds.until("until", wrong)


@pytest.mark.parametrize("given", ["a, b", ["a", "b"], ("a", "b")])
def test_names_are_a_list_or_a_text_with_commas(given: Any) -> None:
    assert kinds.names("tables", given) == ["a", "b"]


@pytest.mark.parametrize("wrong", [None, "", " , ", [], [" "], [1], ["a", None], 5, True, b"a", {"a": 1}])
def test_a_value_that_is_no_list_of_names_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="tables"):
        kinds.names("tables", wrong)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{{ x }}", True),
        ("{% if x %}1{% endif %}", True),
        ({"consumer": "{{ x }}"}, True),
        (["a", "{{ x }}"], True),
        ("{x}", False),
        ({"tube": "q"}, False),
        (5, False),
        (COMMITS, False),
    ],
)
def test_a_template_is_told_from_what_is_written_out(value: Any, told: bool) -> None:
    assert is_template(value) is told


def test_a_value_of_another_task_is_checked_when_it_exists() -> None:
    with DAG("chained"):
        first = StartSagaOperator(task_id="start", saga=SAGA, data={})
        sensor = SagaSensor(task_id="end", saga=first.output)
    assert sensor.upstream_task_ids == {"start"}
    with pytest.raises(InvalidArgument, match="saga must be the number of a saga"):
        sensor.saga = "tour"


def test_a_template_that_was_never_rendered_is_refused_before_the_task_works() -> None:
    task = BatchOperator(task_id="task", feed=COMMITS, process=nothing, limit="{{ params.limit }}")
    with pytest.raises(InvalidArgument, match="limit must be a whole number"):
        task.pre_execute({})
