"""The command ``airflow-pgchange topology-relay``."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

import psycopg
from airflow.utils.providers_configuration_loader import providers_configuration_loaded

from airflow_pgchange.cli.common import conninfo
from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.topology import service
from airflow_pgchange.topology.connection import Limits


@providers_configuration_loaded
def relay(args: Namespace) -> None:
    """Run the relay until it is stopped. It logs to standard error."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
    try:
        limits = Limits() if args.max_clients is None else Limits(max_clients=args.max_clients)
        service.run(
            conninfo(args),
            args.listen,
            users=args.users,
            trust=args.trust,
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
            require_tls=args.require_tls,
            limits=limits,
        )
    except (PgChangeError, psycopg.Error) as error:
        raise SystemExit(f"{type(error).__name__}: {str(error).strip()}") from error
