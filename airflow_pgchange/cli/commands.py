"""The commands and options of ``airflow-pgchange``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.cli.cli_config import (
    ARG_OUTPUT,
    ARG_VERBOSE,
    ActionCommand,
    Arg,
    GroupCommand,
    lazy_load_command,
)


def _arg(*flags: str, **options: Any) -> Arg:
    return Arg(flags, **options)  # type: ignore[no-untyped-call]


POSTGRES_CONN_ID = _arg(
    "--postgres-conn-id",
    help="Airflow connection of the database; for a consumer, the database of its results",
)
DSN = _arg("--dsn", help="libpq connection string of this database, instead of an Airflow connection")
SOURCE_CONN_ID = _arg(
    "--source-conn-id",
    help="Airflow connection of the database with the changes; default: the database of the results",
)
SOURCE_DSN = _arg(
    "--source-dsn", help="libpq connection string of the database with the changes, instead of a connection"
)
SYSTEM = _arg(
    "--system",
    action="append",
    dest="systems",
    help="name of a system, such as revision or tube; can be repeated; default: all",
)
WITHOUT = _arg(
    "--without",
    action="append",
    help="name of a system to leave out, such as topology if PostGIS uses that schema; can be repeated",
)
CONSUMER = _arg(
    "consumer",
    help="the consumer, as status names it: commits:delays/0, tube:copies/0, events:mails, queue:orders/default, "
    "topology:router",
)
MOVABLE = _arg(
    "consumer", help="the consumer, as status names it: commits:delays/0, events:mails, topology:router"
)
DELTA = _arg(
    "--delta",
    metavar="location",
    help="location of a Delta table that refuses the current batch after a restore. Let this table accept the batch, and "
    "change nothing else",
)
REASON = _arg("--reason", required=True, help="the reason, which is recorded")
TO = _arg(
    "--to",
    required=True,
    help="the new position: beginning, now, or a time such as 2026-01-31T12:00:00+00:00. A consumer of the topology "
    "cannot move to a time",
)
START = _arg(
    "--start",
    default="beginning",
    help="the first position: beginning, now, or a time such as 2026-01-31T12:00:00+00:00. A consumer of the topology "
    "cannot start at a time",
)
RETENTION = _arg("--retention", help="delete history that is older than this, such as '30 days'")
RETENTION_BYTES = _arg(
    "--retention-bytes", help="delete the oldest history of a feed beyond this size, such as '10 GB'"
)
RETENTION_COUNT = _arg(
    "--retention-count", type=int, help="delete the oldest history of a feed beyond this number of changes"
)
SAGA_RETENTION = _arg(
    "--saga-retention", help="delete sagas that ended longer ago than this, such as '30 days'"
)
LETTER_RETENTION = _arg(
    "--letter-retention", help="delete dead letters that are older than this, such as '90 days'"
)
EVERY = _arg("--every", help="repeat at this interval until stopped, such as '1 min'; default: run once")
WIDTH = _arg(
    "--width", type=int, help="transaction ids in each partition of the commit queue; default: 1000000"
)
AHEAD = _arg("--ahead", type=int, help="minimum number of empty partitions to create ahead; default: 2")
LETTERS = _arg(
    "ids", nargs="*", type=int, metavar="letter", help="numbers of dead letters, as `letters list` shows them"
)
OF_CONSUMER = _arg(
    "--consumer",
    help="only dead letters of this consumer, by its name in status: commits:delays/0, tube:copies/0",
)
OLDER_THAN = _arg("--older-than", help="only dead letters that are older than this, such as '7 days'")
KEY = _arg("key", help="the iid of a message, the id of an event or of a row, or the value of a field")
FIELD = _arg(
    "--field", help="search for the value in this field of payloads and messages, such as customer.id"
)
YES = _arg("-y", "--yes", action="store_true", help="do not ask for confirmation")

DAG_FILES = _arg(
    "files",
    nargs="*",
    type=Path,
    metavar="file",
    help="DAG files, or folders of them; default: all DAGs that are parsed",
)
NO_SPARK = _arg(
    "--no-spark",
    action="store_true",
    help="do not check Spark, for example on a machine without Java that runs no tasks",
)
LISTEN = _arg("--listen", default="127.0.0.1:4327", help="address and port for clients; default: %(default)s")
USERS = _arg(
    "--users", type=Path, help="file of the users that may connect: names and SCRAM-SHA-256 verifiers"
)
TRUST = _arg("--trust", action="store_true", help="accept every client without a password")
TLS_CERT = _arg("--tls-cert", type=Path, help="certificate for clients that want TLS, in PEM")
TLS_KEY = _arg("--tls-key", type=Path, help="private key of the certificate, in PEM")
REQUIRE_TLS = _arg("--require-tls", action="store_true", help="refuse clients that do not want TLS")
MAX_CLIENTS = _arg("--max-clients", type=int, help="maximum number of connected clients; default: 5000")

WHERE = (POSTGRES_CONN_ID, DSN)
LIMITS = (RETENTION, RETENTION_BYTES, RETENTION_COUNT)
WHERE_BOTH = (POSTGRES_CONN_ID, DSN, SOURCE_CONN_ID, SOURCE_DSN)
COMMON = (ARG_OUTPUT, ARG_VERBOSE)


def _command(function: str, help: str, *args: Arg, name: str | None = None) -> ActionCommand:
    """Define a command. Its default name is the name of its function."""
    return ActionCommand(
        name=name or function.rpartition(".")[2],
        help=help,
        func=lazy_load_command(f"airflow_pgchange.cli.{function}"),
        args=(*args, *COMMON),
    )


def _letters() -> GroupCommand:
    """Define the commands for dead letters.

    A dead letter is stored with its consumer's progress: in the database of the results or, for a tube, in that of the
    changes.
    """
    return GroupCommand(
        name="letters",
        help="Batches, events and messages that consumers gave up: dead letters",
        subcommands=(
            _command(
                "dead_letters.show",
                "List all letters: consumer, reason, and whether the letter can be sent again",
                *WHERE_BOTH,
                OF_CONSUMER,
                OLDER_THAN,
                name="list",
            ),
            _command(
                "dead_letters.redrive",
                "Send letters again, to the consumers that gave them up",
                *WHERE_BOTH,
                LETTERS,
                OF_CONSUMER,
                OLDER_THAN,
            ),
            _command(
                "dead_letters.drop",
                "Delete letters: their changes are lost for the consumers that gave them up",
                *WHERE,
                LETTERS,
                OF_CONSUMER,
                OLDER_THAN,
                YES,
            ),
            _command(
                "dead_letters.erase",
                "Erase the data of one key from letters, and keep the rest",
                *WHERE,
                KEY,
                FIELD,
                OF_CONSUMER,
                YES,
            ),
        ),
    )


def get_pgchange_cli_commands() -> list[GroupCommand]:
    """The commands of this provider."""
    return [
        GroupCommand(
            name="pgchange",
            help="Install, monitor and repair feeds of PostgreSQL changes",
            subcommands=(
                _command("schema.install", "Install the schemas that are missing", *WHERE, SYSTEM, WITHOUT),
                _command("schema.upgrade", "Bring installed schemas to this package's version", *WHERE),
                _command(
                    "schema.uninstall",
                    "Remove schemas with their data, also data that waits to be processed",
                    *WHERE,
                    SYSTEM,
                    YES,
                ),
                _command(
                    "status.status",
                    "Show all consumers: lag, batch in work, and the transaction that holds it back",
                    *WHERE_BOTH,
                ),
                _command(
                    "check.check",
                    "Check that feeds of DAGs can be watched, and that Spark can run batches. The exit code is 1 if not",
                    DAG_FILES,
                    NO_SPARK,
                ),
                _command(
                    "status.health",
                    "Show problems that need attention, each with the call that fixes it. The exit code is 1 if there "
                    "are any, and 2 if the check failed",
                    *WHERE_BOTH,
                ),
                _command(
                    "consumers.skip",
                    "Give up the batch that a consumer cannot finish: it becomes a dead letter",
                    *WHERE_BOTH,
                    CONSUMER,
                    REASON,
                ),
                _command(
                    "consumers.release",
                    "End the leases of a consumer's batches, so that they can be claimed again",
                    *WHERE,
                    CONSUMER,
                    YES,
                ),
                _letters(),
                _command(
                    "consumers.repair",
                    "Let a consumer continue after the source was restored or lost its latest commits",
                    *WHERE_BOTH,
                    CONSUMER,
                    DELTA,
                    YES,
                ),
                _command(
                    "consumers.register",
                    "Register a new consumer with its first position",
                    *WHERE_BOTH,
                    MOVABLE,
                    START,
                ),
                _command(
                    "consumers.move",
                    "Move a consumer to another position: it skips changes, or processes changes again",
                    *WHERE_BOTH,
                    MOVABLE,
                    TO,
                    YES,
                ),
                _command(
                    "consumers.drop",
                    "Delete a consumer with its progress and its dead letters",
                    *WHERE_BOTH,
                    MOVABLE,
                    YES,
                ),
                ActionCommand(
                    name="topology-relay",
                    help="Run the relay that sends a cluster's topology to its clients, until stopped",
                    func=lazy_load_command("airflow_pgchange.cli.topology.relay"),
                    args=(
                        *WHERE,
                        LISTEN,
                        USERS,
                        TRUST,
                        TLS_CERT,
                        TLS_KEY,
                        REQUIRE_TLS,
                        MAX_CLIENTS,
                        ARG_VERBOSE,
                    ),
                ),
                ActionCommand(
                    name="maintain",
                    help="Maintain a database, once or until stopped: create partitions, repair captures, delete old "
                    "history and leftovers",
                    func=lazy_load_command("airflow_pgchange.cli.maintenance.maintain"),
                    args=(
                        *WHERE,
                        EVERY,
                        WIDTH,
                        AHEAD,
                        *LIMITS,
                        SAGA_RETENTION,
                        LETTER_RETENTION,
                        ARG_VERBOSE,
                    ),
                ),
                _command(
                    "maintenance.trim",
                    "Delete history beyond the limits, if every consumer has processed it",
                    *WHERE,
                    *LIMITS,
                    YES,
                ),
            ),
        )
    ]
