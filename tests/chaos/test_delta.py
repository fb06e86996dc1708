"""Rows in a Delta table are exactly once, whichever worker or server is killed, or overtaken by its retry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest

from airflow_pgchange.lake import Delta
from airflow_pgchange.lake.delta import object_store
from demo.duckdb_reader import DELTA
from tests.chaos.delta_worker import DeltaWorker
from tests.chaos.harness import PROOF, SEED
from tests.chaos.lake_worker import ONE_LOOK, REMOTE_STEPS, ROWS
from tests.chaos.test_lake import CRASH, OVERTAKEN, Campaign, found, passed
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

    @cached_property
    def location(self) -> str:
        """The location of the table."""
        return str(self.folder / "delta") if self.server is None else f"s3://{self.server.bucket()}/delta"

    def new_table(self) -> None:
        made(self.location, ROWS)

    def commits(self) -> int:
        return object_store.opened(Delta(self.location)).version()

    def ids(self) -> list[int]:
        return found("delta_scan", self.location, DELTA, self.server)

    def worker(self, number: int) -> DeltaWorker:
        seed = f"{SEED} {number}"
        return DeltaWorker(
            number, self.source, str(self.folder), seed, fault=self.fault, location=self.location
        )


@LARGER
@pytest.mark.timeout(900)
def test_kills_lose_and_double_no_row_of_a_delta_table(new_cluster, tmp_path):
    """Takes a minute at a release: workers are killed, and overtaken by a retry, before and after the commit to the
    table."""
    passed(DeltaCampaign(new_cluster(), tmp_path))


@LARGER
@pytest.mark.timeout(900)
def test_kills_lose_and_double_no_row_of_a_delta_table_on_s3(new_cluster, tmp_path, s3_server):
    """Takes a minute at a release: the same campaign, with the table's log and files on S3."""
    passed(DeltaCampaign(new_cluster(), tmp_path, server=s3_server))


@PROOF
def test_the_campaign_catches_a_commit_to_a_delta_table_without_another_look(new_cluster, tmp_path):
    """Takes seconds: processes are killed and overtaken until both have happened at the right moments."""
    assert DeltaCampaign(new_cluster(), tmp_path, ONE_LOOK).run().twice > 0
