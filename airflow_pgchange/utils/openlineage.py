"""What became of batches and backfills, in the words of OpenLineage. Needs the extra ``openlineage``."""

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
    """How many changes a run processed, and in which batches: the latest twenty ids."""

    feed: str
    batches: int
    changes: int
    batch_ids: list[str]


def of_batches(outcome: Outcome, postgres_conn_id: str, source: str, results: str) -> Lineage:
    """The feed of an Airflow connection and its tables at ``source`` went into those that were written at ``results``.

    Which column came of which is told of copies; else only the callable or the application knows.
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
    """A table that was written, with where its columns came from as far as that is known."""
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
    """A table of a lake by its location, as OpenLineage names files, with the version that was written."""
    parts = urlsplit(location)
    namespace, path = (f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))
    if parts.scheme in ("", "file"):
        namespace, path = "file", parts.path
    facets = {} if output.version is None else {"version": DatasetVersionDatasetFacet(output.version)}
    table = SymlinksDatasetFacet([Identifier(namespace, output.target, "TABLE")])
    return Dataset(namespace, path, facets={**facets, "symlinks": table})


def of_backfills(done: Backfilled, postgres_conn_id: str) -> Lineage:
    """Tables went into what the workers of a tube are to replay."""
    return OperatorLineage(
        inputs=datasets(done.conninfo, done.tables),
        outputs=[dataset_of(worker, postgres_conn_id) for worker in done.workers],
    )


def datasets(conninfo: str, tables: Iterable[Table]) -> list[Dataset]:
    """Tables of a server, as OpenLineage names those of PostgreSQL."""
    return [Dataset(server_uri(conninfo), ".".join(table)) for table in sorted(tables)]


def dataset_of(feed: Watched, postgres_conn_id: str) -> Dataset:
    """A feed: the namespace is that of its Airflow connection, as in the URI of its asset."""
    return Dataset(f"pgchange://{postgres_conn_id}", feed.name)
