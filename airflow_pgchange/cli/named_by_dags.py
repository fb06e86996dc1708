"""What Airflow knows of the consumers of a database that ``status`` and ``health`` show."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from airflow_pgchange.cli.common import metadata
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.plugins.dag_reasons import DagReason, dag_reasons
from airflow_pgchange.plugins.places import Key, Naming, ParsedDags, Place, Places


@dataclass
class Named:
    """The consumers that DAGs name at the connections that the options name; none for a database that they name by its
    connection string, because DAGs name databases by connections alone."""

    place: Place
    places: Places = field(default_factory=Places)

    @property
    def consumers(self) -> Mapping[Key, Naming]:
        return self.places.consumers[self.place]

    def reasons(self, keys: Collection[Key]) -> Mapping[Key, list[DagReason]]:
        """Why the DAGs of these consumers do not process their changes, of those of which Airflow knows that."""
        if not keys or not self.consumers:
            return {}
        with metadata("run airflow db migrate") as session:
            found = dag_reasons(session, self.places, [(self.place, key) for key in keys])
        return {key: reasons for (_, key), reasons in found.items()}


def named_by_dags(args: Namespace, warn: Callable[[str], None]) -> Named:
    """What DAGs name at these connections. If Airflow's own database does not answer, ``warn`` is told."""
    source = None if args.source_conn_id == args.postgres_conn_id else args.source_conn_id
    named = Named(Place(args.postgres_conn_id or "", source))
    if args.postgres_conn_id is None or args.source_dsn is not None:
        return named
    try:
        with metadata("what DAGs name is left out") as session:
            named.places = ParsedDags().places(session)
    except InvalidArgument as error:
        warn(str(error))
    return named
