"""Convert the outcome of batches and backfills to OpenLineage. Needs the extra ``openlineage``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any
from urllib.parse import urlsplit

import attr

from airflow_pgchange.errors import ExtraMissing
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.feeds.outputs import Output
from airflow_pgchange.utils.lineage import Backfilled
from airflow_pgchange.utils.outcome import Outcome, Table
from airflow_pgchange.utils.server_uri import server_uri

try:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset, InputDataset
    from openlineage.client.facet_v2 import RunFacet
    from openlineage.client.generated.column_lineage_dataset import (
        ColumnLineageDatasetFacet,
        Fields,
        InputField,
        Transformation,
    )
    from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet
    from openlineage.client.generated.input_statistics_input_dataset import InputStatisticsInputDatasetFacet
    from openlineage.client.generated.symlinks_dataset import Identifier, SymlinksDatasetFacet
except ImportError as error:
    raise ExtraMissing(
        f"lineage needs {error.name}: pip install 'airflow-provider-pgchange[openlineage]'"
    ) from error

Lineage = OperatorLineage[Any, Any]
AS_IT_IS = Transformation(type="DIRECT", subtype="IDENTITY")


@attr.define
class BatchesRunFacet(RunFacet):
    """The number of batches and changes that a run processed, and the ids of the latest twenty batches."""

    feed: str
    batches: int
    changes: int
    batch_ids: list[str]


def of_batches(outcome: Outcome, postgres_conn_id: str, source: str, results: str) -> Lineage:
    """Return the lineage of batches: from the feed and its tables to the tables that the batches wrote.

    ``source`` and ``results`` are libpq strings. Only copied tables have lineage of columns, because only the callable or
    the application knows the origin of other columns.
    """
    feed = dataset_of(outcome.feed, postgres_conn_id)
    counted = InputStatisticsInputDatasetFacet(rowCount=outcome.changes)
    return OperatorLineage(
        inputs=[
            InputDataset(feed.namespace, feed.name, inputFacets={"inputStatistics": counted}),
            *datasets(source, outcome.sources),
        ],
        outputs=[
            *(_output(outcome, target, source, results) for target in sorted(outcome.targets)),
            *(_lake_table(location, output) for location, output in sorted(outcome.lake.items())),
        ],
        run_facets={"pgchange": BatchesRunFacet(batches=outcome.batches, **outcome.summary())},
    )


def _output(outcome: Outcome, target: Table, source: str, results: str) -> Dataset:
    """Return the dataset of a written table, with the origins of its columns if they are known."""
    fields: dict[str, list[InputField]] = defaultdict(list)
    for copied in sorted(outcome.copied.get(target, ()), key=astuple):
        for table in outcome.sources:
            if table[1:] == (copied.schema, copied.name):
                [origin] = datasets(source, [table])
                for column in copied.columns:
                    fields[column].append(InputField(origin.namespace, origin.name, column, [AS_IT_IS]))
    [written] = datasets(results, [target])
    if fields:
        facet = ColumnLineageDatasetFacet({name: Fields(inputs) for name, inputs in fields.items()})
        written.facets = {"columnLineage": facet}
    return written


def _lake_table(location: str, output: Output) -> Dataset:
    """Return the dataset of a lake table, named by its location as OpenLineage names files, with the written version."""
    parts = urlsplit(location)
    namespace, path = (f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))
    if parts.scheme in ("", "file"):
        namespace, path = "file", parts.path
    facets = {} if output.version is None else {"version": DatasetVersionDatasetFacet(output.version)}
    table = SymlinksDatasetFacet([Identifier(namespace, output.target, "TABLE")])
    return Dataset(namespace, path, facets={**facets, "symlinks": table})


def of_backfills(done: Backfilled, postgres_conn_id: str) -> Lineage:
    """Return the lineage of a backfill: from its tables to the feeds of the tube's workers."""
    return OperatorLineage(
        inputs=datasets(done.conninfo, done.tables),
        outputs=[dataset_of(worker, postgres_conn_id) for worker in done.workers],
    )


def datasets(conninfo: str, tables: Iterable[Table]) -> list[Dataset]:
    """Return the datasets of tables, as OpenLineage names tables of PostgreSQL."""
    return [Dataset(server_uri(conninfo), ".".join(table)) for table in sorted(tables)]


def dataset_of(feed: Watched, postgres_conn_id: str) -> Dataset:
    """Return the dataset of a feed. The namespace has its Airflow connection, as in the URI of its asset."""
    return Dataset(f"pgchange://{postgres_conn_id}", feed.name)
