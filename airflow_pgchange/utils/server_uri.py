"""The name of a server in the URIs of assets and in lineage."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict


def server_uri(conninfo: str) -> str:
    """Return the URI of the first server in a connection string.

    The first server stands for the whole group, so that a table is the same asset after a failover.
    """
    options = conninfo_to_dict(conninfo)
    host = str(options.get("host") or options.get("hostaddr") or "").split(",")[0]
    port = str(options.get("port") or "").split(",")[0] or "5432"
    if not host or host.startswith(("/", "@")):
        host = "localhost"
    return f"postgres://[{host}]:{port}" if ":" in host else f"postgres://{host}:{port}"
