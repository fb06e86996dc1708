"""Airflow's information about the consumers that ``status`` and ``health`` show."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from airflow_pgchange.cli.common import metadata
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.plugins.dag_reasons import DagReason, dag_reasons
from airflow_pgchange.plugins.databases import Key, Naming, ParsedDags, Place, Places


@dataclass
class Named:
    """The consumers that DAGs name at the connections of the command's options.

    There are none if the options contain a connection string, because DAGs name databases only by connections.
    """

    place: Place
    places: Places = field(default_factory=Places)

    @property
    def consumers(self) -> Mapping[Key, Naming]:
        return self.places.consumers[self.place]

    def reasons(self, keys: Collection[Key]) -> Mapping[Key, list[DagReason]]:
        """Return the reasons why the DAGs of these consumers do not process their changes, as far as Airflow knows."""
        if not keys or not self.consumers:
            return {}
        with metadata("run airflow db migrate") as session:
            by_consumer = dag_reasons(session, self.places, [(self.place, key) for key in keys])
        return {key: reasons for (_, key), reasons in by_consumer.items()}


def named_by_dags(args: Namespace, warn: Callable[[str], None]) -> Named:
    """Read the consumers that DAGs name. If Airflow's own database does not answer, call ``warn`` and return none."""
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
