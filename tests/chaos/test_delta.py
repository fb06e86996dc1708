"""Rows in a Delta table are exactly once, whichever worker or server is killed, or overtaken by its retry."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from airflow_pgchange.lake.delta import store
from demo.duckdb_reader import DELTA, read
from tests.chaos.delta_worker import DeltaWorker
from tests.chaos.harness import PROOF, SEED
from tests.chaos.lake_worker import ONE_LOOK, REMOTE_STEPS, ROWS
from tests.chaos.test_lake import CRASH, OVERTAKEN, Campaign, passed
from tests.deltas import made

LARGER = pytest.mark.release("every run has an attempt that its retry overtakes, in tests/integration/lake")


@dataclass
class DeltaCampaign(Campaign):
    @property
    def steps(self) -> tuple[str, ...]:
        return REMOTE_STEPS

    @property
    def events(self) -> set[str]:
        return {*self.steps, CRASH, OVERTAKEN}

    def new_table(self) -> None:
        made(self.worker(0).table.location, ROWS)

    def commits(self) -> int:
        return store.opened(self.worker(0).table).version()

    def ids(self) -> list[int]:
        found = read("select id from delta_scan(?)", self.worker(0).table.location, extensions=DELTA)
        return [id_ for (id_,) in found]

    def worker(self, number: int) -> DeltaWorker:
        return DeltaWorker(number, self.source, str(self.folder), f"{SEED} {number}", fault=self.fault)


@LARGER
@pytest.mark.timeout(900)
def test_kills_lose_and_double_no_row_of_a_delta_table(new_cluster, tmp_path):
    """A minute at a release: workers are killed, and overtaken by a retry, before and after the commit to the table."""
    passed(DeltaCampaign(new_cluster(), tmp_path))


@PROOF
def test_the_campaign_catches_a_commit_to_a_delta_table_without_another_look(new_cluster, tmp_path):
    """Seconds: processes are killed, and overtaken, until each of that has happened."""
    assert DeltaCampaign(new_cluster(), tmp_path, ONE_LOOK).run().twice > 0
