"""The arguments of the sensor of a saga and of the schedule of its handlers."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_pgchange.assets.sagas import saga_schedule
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.messages import Saga, Step
from airflow_pgchange.sensors.sagas import SagaSensor

SAGA = Saga("tour", (Step("room", "rooms", "cancel_rooms"),))


class Asked(Exception):
    """Raised when the sensor queries the database, which means that it has accepted its arguments."""


@pytest.fixture
def poke(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ask(*_: Any, **__: Any) -> None:
        raise Asked

    monkeypatch.setattr(PgChangeHook, "get_conn", ask)
    monkeypatch.setattr("airflow_pgchange.sensors.sagas.ask", ask)
    return lambda saga: SagaSensor(task_id="ends", saga=saga).poke({})


@pytest.mark.parametrize(
    "saga", [True, 1.9, "1.9", "1.0", None, "", -1, "-1", "1_0", "\u0661", 10**25, [1], "one"]
)
def test_a_value_that_is_no_number_of_a_saga_is_refused(poke: Any, saga: Any) -> None:
    with pytest.raises(InvalidArgument, match="saga must be the number of a saga"):
        poke(saga)


@pytest.mark.parametrize("saga", [1, "1", " 12\n"])
def test_the_number_of_a_saga_may_be_a_text_as_a_template_gives_it(poke: Any, saga: Any) -> None:
    with pytest.raises(Asked):
        poke(saga)


def feeds(**options: Any) -> list[QueueFeed]:
    return [asset.watchers[0].trigger.feed for asset in saga_schedule(SAGA, "shop", **options).objects]


def test_a_schedule_watches_the_consumers_by_whom_handlers_receive() -> None:
    assert feeds(consumers={"rooms": "fast"}) == [
        QueueFeed("rooms", "fast"),
        QueueFeed("cancel_rooms"),
        QueueFeed("tour_end"),
        QueueFeed("tour_rolled_back"),
    ]


@pytest.mark.parametrize("queue", ["bungs", "room"])
def test_a_schedule_has_no_consumers_of_queues_that_no_handler_has(queue: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"no handler of it receives from {queue}: name consumers of rooms"
    ):
        feeds(consumers={queue: "fast"})
