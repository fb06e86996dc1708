"""The errors after which a task is not retried."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, BaseOperator
from airflow.sdk import DAG

from airflow_pgchange import errors
from airflow_pgchange.feeds.error_translation import is_of_the_batch
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.sensors.feed import unless_error
from airflow_pgchange.spark import poison_batch
from airflow_pgchange.utils import compat
from airflow_pgchange.utils.compat import RetryDecision
from airflow_pgchange.utils.retry_policy import UnlessPermanent
from tests.every_operator import ARGUMENTS, COMMITS, nothing

PERMANENT = {
    "BatchGivenUp",
    "ExtraMissing",
    "HistoryTrimmed",
    "InvalidArgument",
    "LetterRefused",
    "OutcomeUnknown",
    "PermissionDenied",
    "PoisonousChange",
    "SchemaMissing",
    "SchemaVersionMismatch",
    "SourceLostTail",
    "SourceRestored",
    "UnknownBranch",
    "UnknownLetter",
    "UnsupportedType",
    "VersionsDiffer",
}


def test_errors_after_which_a_retry_does_not_help_have_a_common_base() -> None:
    found = {
        one.__name__
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.Permanent)
    }
    assert found - {"Permanent"} == PERMANENT


@pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)
def test_no_operator_tries_again_what_no_other_try_mends(kind: Any) -> None:
    with DAG("plain"):
        policy = kind(task_id="task", **ARGUMENTS[kind]).retry_policy
    decided = [policy.evaluate(error, 1, 3) for error in (errors.SchemaMissing("x"), ValueError("x"))]
    assert decided == [RetryDecision.fail(str(decided[0].reason)), RetryDecision.default()]


def test_a_policy_of_the_users_own_is_kept() -> None:
    """Airflow before 3.3 has no policies for an operator."""
    policies = pytest.importorskip("airflow.sdk.definitions.retry_policy")
    own = policies.ExceptionRetryPolicy(rules=[])
    with DAG("own", default_args={"retry_policy": own}):
        given = BatchOperator(task_id="by_default", feed=COMMITS, process=nothing)
    assert given.retry_policy is own
    assert BatchOperator(task_id="t", feed=COMMITS, process=nothing, retry_policy=own).retry_policy is own


def test_an_operator_fails_at_once_where_airflow_has_no_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "airflow.sdk.definitions.retry_policy", None)
    spec = importlib.util.spec_from_file_location("older_compat", compat.__file__)
    assert spec is not None
    assert spec.loader is not None
    older = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "older_compat", older)
    spec.loader.exec_module(older)

    class Policy(older.RetryPolicy):  # type: ignore[misc, name-defined]
        def evaluate(self, exception: BaseException, *_: object) -> Any:
            permanent = isinstance(exception, errors.Permanent)
            return older.RetryDecision.fail("no use") if permanent else older.RetryDecision.default()

    class Operator:
        retry_policy = Policy()

        def execute(self, error: Exception) -> None:
            raise error

        resume_execution = execute

    older.with_retry_policy(Operator)
    for run in (Operator().execute, Operator().resume_execution):
        with pytest.raises(AirflowFailException, match="no schema"):
            run(errors.SchemaMissing("no schema"))
        with pytest.raises(ZeroDivisionError):
            run(ZeroDivisionError())

    class Parent(BaseOperator):
        """A class without a method ``execute``."""

    class OtherParent(BaseOperator):
        def execute(self, context: Any) -> None:
            """Do nothing."""

    class Child(Parent, OtherParent):
        """A class whose method ``execute`` comes from its other base class."""

    older.with_retry_policy(Parent)
    assert Child.execute is OtherParent.execute


def test_the_policy_comes_back_from_what_it_is_stored_as() -> None:
    assert isinstance(UnlessPermanent.deserialize(UnlessPermanent().serialize()), UnlessPermanent)


@pytest.mark.parametrize(
    ("event", "raised"),
    [
        ({"error": "no branch", "permanent": True}, AirflowFailException),
        ({"error": "gone", "permanent": False}, AirflowException),
        ({"error": "of a trigger before an upgrade"}, AirflowException),
    ],
)
def test_a_deferred_sensor_tries_again_what_its_trigger_says(event: Any, raised: type[Exception]) -> None:
    with pytest.raises(AirflowException) as told:
        unless_error(event)
    assert type(told.value) is raised


@pytest.mark.parametrize(
    ("error", "of_the_batch"),
    [
        (ZeroDivisionError(), True),
        (psycopg.errors.UniqueViolation(), True),
        (errors.MergeRefused("x"), True),
        (errors.ApplicationFailed("x"), True),
        (psycopg.errors.DiskFull(), False),
        (psycopg.OperationalError("gone"), False),
        (errors.ConnectionLost("x"), False),
        (errors.StagingOutdated("x"), False),
        (errors.PermissionDenied("x"), False),
        (ConnectionResetError(), False),
    ],
)
def test_a_batch_is_blamed_for_what_may_be_in_it_alone(error: Exception, of_the_batch: bool) -> None:
    assert is_of_the_batch(error) is of_the_batch


class SparkError(Exception):
    """An exception as Spark raises it: the text quotes the error of an executor."""


@pytest.mark.parametrize(
    ("error", "of_the_batch"),
    [
        (ValueError("no such currency"), True),
        (SparkError("Job aborted due to stage failure: ValueError: no such currency"), True),
        (SparkError("Job aborted due to stage failure: psycopg.OperationalError: connection failed"), False),
        (SparkError("Job aborted due to stage failure: ExecutorLostFailure (executor 1 exited)"), False),
        (errors.ServerUnavailable("gone"), False),
        (KeyboardInterrupt(), False),
        (SystemExit(1), False),
    ],
)
def test_an_application_notes_an_error_of_its_batch_and_no_outage(
    error: BaseException, of_the_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    first, second = tmp_path / "manifest-1.json", tmp_path / "manifest-2.json"
    poison_batch.note_errors(first)
    poison_batch.note_errors(second)
    sys.excepthook(type(error), error, None)
    assert (shown, poison_batch.is_noted(first), poison_batch.is_noted(second)) == (
        [error],
        False,
        of_the_batch,
    )


def test_an_error_that_an_outage_caused_is_an_outage() -> None:
    error = ValueError("no rate")
    error.__cause__ = errors.ServerUnavailable("gone")
    assert not poison_batch.is_of_the_content(error)
